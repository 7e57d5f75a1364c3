"""One forward and backward of FSDP: which copy of a unit's weights its modules have, and what an exception leaves behind.

Private APIs of torch's FSDP, as in `fsdp_groups`. Knows groups, not when a copy is current: `weight_copies` tells.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as _TrainingState

from fullshard.on_torch.private.fsdp_groups import GatherGroup, gather_group


class UnitCopies:
    """The copies of one unit's weights: the shards, and what is gathered of them.

    Outside of forward and backward the modules have the shards, also while the gathered weights wait for backward. A gathered
    copy that is not `current` any more is gathered anew by the next forward. FSDP does neither.
    """

    def __init__(self, group: GatherGroup, stamp: Callable[[], "Stamp"], done: Callable[["UnitCopies"], None]):
        self.group, self.stamp, self.done = group.group, stamp, done
        self.modules: tuple[nn.Module, ...] = tuple(self.group.modules)
        self.gathered_at: Stamp | None = None
        self.kept = False  # gathered to stay so for later micro-batches
        self.used_at: Stamp | None = None  # by a forward; a prefetched gather may be followed by none
        mesh = self.group.mesh_info
        self.ranks = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)  # that reduce together
        self.begin_step()
        self._unshard, self._reduce, self._finalize = self.group.unshard, self.group.post_backward, self.group.finalize_backward
        self.group.unshard, self.group.post_backward = self._gather, self._reduce_used
        self._begin, self.group.pre_forward = self.group.pre_forward, self._forward_begins
        self.group.finalize_backward = self._backward_done

    def _forward_begins(self, *about: Any) -> Any:
        self.used_at = self.stamp()
        return self._begin(*about)

    def _gather(self, async_op: bool = False) -> None:
        group = self.group
        if group._training_state is _TrainingState.FORWARD and self._stale():
            self._drop_pending()
            group._to_sharded()
        if group.is_unsharded:
            self._show("_unsharded_param")
        elif group.is_sharded and group._all_gather_result is None:
            self.gathered_at, self.kept = self.stamp(), not group.reshard_after_backward
        self._unshard(async_op)

    def _stale(self) -> bool:
        if self.group.is_sharded and self.group._all_gather_result is None:
            return False
        return self.gathered_at is None or not self.gathered_at.serves(self.stamp(), self.kept)

    def _drop_pending(self) -> None:
        """A gather that was issued ahead, and that no forward has waited for."""
        result, self.group._all_gather_result = self.group._all_gather_result, None
        if result is None:
            return
        if result.all_gather_event is not None and torch.cuda.is_available():
            torch.cuda.current_stream().wait_event(result.all_gather_event)
        if hasattr(result.all_gather_work, "wait"):
            result.all_gather_work.wait()

    def _reduce_used(self, *unused: Any) -> None:
        """FSDP reduces at the end of backward what was not; of a unit that was never gathered, it would look for gradients."""
        if any(hasattr(p, "_unsharded_param") for p in self.group.fsdp_params):
            if self.group.reduce_grads and self.ranks > 1:
                self._borrow_zeros()
            self._reduce(*unused)

    def _borrow_zeros(self) -> None:
        """If some parameters to train have a gradient, give the others one of zeros. FSDP reduces those that there are as one
        vector, and another rank may have used others."""
        trained = [(i, p) for i, p in enumerate(self.group.fsdp_params) if p.sharded_param.requires_grad]
        without = [(i, p) for i, p in trained if p.unsharded_accumulated_grad is None and p._unsharded_param.grad is None]
        if len(without) == len(trained):
            return
        missing = {i for i, _ in without}
        for i, _ in trained:
            self.used[i] = self.used[i] or i not in missing
        for i, p in without:
            self.borrowed[i] = True
            p._unsharded_param.grad = torch.zeros_like(p._unsharded_param).detach()

    def begin_step(self) -> None:
        """Forget which parameters backward has used."""
        count = len(self.group.fsdp_params)
        self.used, self.borrowed = [False] * count, [False] * count

    def unused(self) -> int:
        """How many parameters have borrowed zeros since the step began, and were not used."""
        return sum(b and not u for b, u in zip(self.borrowed, self.used, strict=True))

    def drop_borrowed(self, unused: list[bool]) -> set[int]:
        """Drop gradients that are borrowed zeros alone, of parameters that are `unused` on all ranks. Returns their `id`s."""
        found = [p.sharded_param for p, b, none in zip(self.group.fsdp_params, self.borrowed, unused, strict=True) if b and none]
        for p in found:
            p.grad = None
        return {id(p) for p in found}

    def _backward_done(self) -> None:
        self._finalize()
        self.done(self)

    def show_shards(self) -> None:
        """Let the modules have the shards. What is gathered stays, for backward."""
        if not self.group.is_sharded:
            self._show("sharded_param")

    def _show(self, which: str) -> None:
        for p in self.group.fsdp_params:
            p._setattr_on_modules(getattr(p, which))

    def free(self) -> None:
        """Free what is gathered."""
        self._drop_pending()
        self.group._to_sharded()

    def trained(self) -> list[bool]:
        return [p.sharded_param.requires_grad for p in self.group.fsdp_params]

    def find_dtypes(self) -> None:
        """FSDP finds the dtypes of gradients once, of the parameters that are trained then."""
        if hasattr(self.group, "_orig_dtype"):
            kept = self.group._orig_dtype
            self.group._init_mp_dtypes()
            self.group._orig_dtype = kept or self.group._orig_dtype

    def with_gradient(self) -> str | None:
        """The name of a parameter that has a gradient, reduced or not."""
        for p in self.group.fsdp_params:
            unreduced = p.unsharded_accumulated_grad is not None or (
                hasattr(p, "_unsharded_param") and p._unsharded_param.grad is not None
            )
            if unreduced or p.sharded_param.grad is not None:
                return str(p._param_fqn)
        return None

    def drop_unreduced(self) -> None:
        """Drop gradients that wait for the reduction: the caller's `zero_grad` sees those of the shards alone."""
        self.group._partial_reduce_output = None
        self.begin_step()
        for p in self.group.fsdp_params:
            p.unsharded_accumulated_grad = None
            if hasattr(p, "_unsharded_param"):
                p._unsharded_param.grad = None


class Stamp:
    """A moment of a run: how often weights have changed, and how many forwards of the model have begun."""

    __slots__ = ("changes", "forwards")

    def __init__(self, changes: int, forwards: int):
        self.changes, self.forwards = changes, forwards

    def serves(self, now: "Stamp", kept: bool) -> bool:
        """True if what was gathered at this moment is current now. `kept`: it was to stay gathered for later forwards."""
        return self.changes == now.changes and (kept or self.forwards == now.forwards)


def unit_copies(model: nn.Module, stamp: Callable[[], Stamp], done: Callable[[UnitCopies], None]) -> list[UnitCopies]:
    """Of all units of the model, the outer ones first. `done`: called for each after a backward. Call last: methods of FSDP are
    replaced that others have replaced before."""
    groups = [g for m in model.modules() if isinstance(m, FSDPModule) and (g := gather_group(m)) is not None]
    return [UnitCopies(g, stamp, done) for g in {id(g.group): g for g in groups}.values()]


def in_backward() -> bool:
    """True inside of backward, on its thread."""
    return torch._C._current_graph_task_id() != -1


def runs_now(model: nn.Module) -> bool:
    """True if this thread is inside the model's forward."""
    frame, code = sys._getframe(), nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def unfinished(model: nn.Module) -> bool:
    """True if a forward or a backward of the model has begun and not ended."""
    assert isinstance(model, FSDPModule)
    context = model._get_fsdp_state()._state_ctx
    return context.iter_forward_root is not None or context.post_backward_final_callback_queued


def reset_iteration(model: nn.Module) -> None:
    """After a forward or backward that failed: free what is gathered, and forget what was to follow. Gradients stay."""
    assert isinstance(model, FSDPModule)
    state: Any = model._get_fsdp_state()
    if state._is_root is None:
        return  # nothing has run
    if state._device.type == "cuda":
        torch.cuda.synchronize(state._device)  # the allocator may reuse the memory of collectives under way
    _forget_communication(state._comm_ctx)
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = _TrainingState.IDLE
        for group in _groups(each):
            _forget_group(group)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and newer
    return list(several) if several is not None else [g for g in [state._fsdp_param_group] if g is not None]


def _forget_communication(context: Any) -> None:
    context.post_forward_order.clear()
    for name in ("all_gather_state", "reduce_scatter_state"):
        if hasattr(context, name):
            setattr(context, name, None)
    for name in ("reduce_scatter_states", "_last_post_reduce_events"):
        if hasattr(context, name):
            getattr(context, name).clear()


def _forget_group(group: Any) -> None:
    result, group._all_gather_result = group._all_gather_result, None
    if result is not None and hasattr(result.all_gather_work, "wait"):
        result.all_gather_work.wait()
    for name in ("_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event", "_partial_reduce_output"):
        if hasattr(group, name):
            setattr(group, name, None)
    group._post_forward_indices.clear()
    group._training_state = _TrainingState.IDLE
    group._to_sharded()
