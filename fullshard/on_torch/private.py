"""The private parts of torch that the engine touches, all of them, so that a new torch is one file to mend."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import _C, Tensor, _foreach_copy_, dtype, empty, nn, ones_like
from torch.autograd.graph import _engine_run_backward
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "WRAPPERS",
    "FSDPParamGroup",
    "GatherGroup",
    "StorageWeakRef",
    "TorchDispatchMode",
    "addresses",
    "cut_dim",
    "default_store",
    "flight_records",
    "forget_meshes",
    "gather_group",
    "group_size",
    "inner",
    "keep_reductions_off_the_bus",
    "one_of",
    "persistent_buffers",
    "run_backward",
    "same_cut",
    "saving",
    "sole_owner",
]


def default_store() -> dist.Store:
    """The store through which the ranks met."""
    return dist.distributed_c10d._get_default_store()


def flight_records() -> list[dict[str, Any]]:
    """The newest collectives of this rank as torch's flight recorder has them, oldest first; none where it does not run."""
    dump = getattr(_C._distributed_c10d, "_dump_fr_trace_json", None) or getattr(
        _C._distributed_c10d, "_dump_nccl_trace_json", None
    )
    try:
        return json.loads(dump(True, False)).get("entries", []) if dump else []
    except (RuntimeError, ValueError):
        return []


WRAPPERS = (DTensor, AsyncCollectiveTensor)  # tensors that hold another, and no memory of their own


def inner(tensor: Tensor) -> Tensor:
    """The tensor that has the memory."""
    while isinstance(tensor, WRAPPERS):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.elem
    return tensor


@contextmanager
def one_of(ranks: int) -> Iterator[None]:
    """Inside, this process is the first of so many ranks, of which there are no others: collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def forget_meshes() -> None:
    """DTensor remembers what becomes of its operands together with their mesh; a later one that looks the same would be
    answered with the groups of the earlier."""
    from torch.distributed.tensor import debug  # brings torch's compiler along: a second that `import` need not take

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def cut_dim(placement: Placement) -> int | None:
    """The dim that a placement cuts, if it cuts one. FSDP over a tensor axis cuts with strides, which in
    newer torch is no `Shard` any more."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def group_size(name: object) -> int:
    """How many ranks the process group of a functional collective has."""
    return _resolve_process_group(name).size()  # type: ignore[arg-type]


def run_backward(value: Tensor) -> None:
    """`value.backward()`, with function modes heard inside: the public ways silence them for as long as they run."""
    _engine_run_backward((value,), (ones_like(value),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def saving() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The innermost hooks through which autograd saves a tensor and gets it back."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


def _owners(tensor: Tensor) -> int:
    return _C._storage_Use_Count(tensor.untyped_storage()._cdata)


def sole_owner(tensor: Tensor) -> bool:
    """Whether no other tensor shares this one's memory: what autograd asks before it adds in place."""
    return _owners(tensor) == _owners(empty(1, device=tensor.device))


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where this rank's parts of tensors lie now; `to_local` costs ten times as much."""
    return [(t._local_tensor if isinstance(t, DTensor) else t).data_ptr() for t in tensors]


def same_cut(like: DTensor, part: Tensor) -> DTensor:
    """A DTensor cut like another, of which this rank's part is `part`; the public way would move it to the mesh's device."""
    assert like._spec.tensor_meta is not None
    meta = like._spec.tensor_meta._replace(dtype=part.dtype)
    return DTensor(part, dataclasses.replace(like._spec, tensor_meta=meta), requires_grad=False)


def persistent_buffers(model: nn.Module) -> set[str]:
    """The names of the buffers that a state dict has."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


class GatherGroup:
    """FSDP's group of the parameters of one unit, as far as homes need it."""

    def __init__(self, group: Any):
        self.group = group

    def reduce_into(self, kind: dtype) -> None:
        """Gradients stay in this dtype after the reduction, whatever that of the shards. FSDP sets its own when it first
        runs, so this is said before every gather."""
        self.group._orig_dtype = kind

    def around_gather(self, before: Callable[[], None], at_copy: Callable[[], None], after: Callable[[], None]) -> None:
        """Call `before` when a gather is to be issued, `at_copy` before the gathered parameters are copied out, and
        `after` when that is queued. Alone in its group, FSDP copies from the shard at the second moment."""
        group, unshard, wait = self.group, self.group.unshard, self.group.wait_for_unshard

        def issue(async_op: bool = False) -> None:
            if group.is_sharded and group._all_gather_result is None:
                before()
            unshard(async_op)

        def copy_out() -> None:
            if group._all_gather_result is None:
                return wait()
            at_copy()
            wait()
            after()

        group.unshard, group.wait_for_unshard = issue, copy_out

    def adopt(self) -> None:
        """Take the modules' parameters as they are now for the shards, for good. FSDP does it when it first runs and after
        `load_state_dict`; by then the memory of shards that rest elsewhere is gone."""
        for p in self.group.fsdp_params:
            p.reset_sharded_param()
            p._init_extensions()
            p.reset_sharded_param = _nothing
        self.group._reset_sharded_params = True

    def hold_gathers(self, event: Any) -> None:
        """Gathers issued from here on read the shards after `event`."""
        self.group._wait_all_gather_streams_on_event(event)

    def padded(self) -> list[tuple[Any, int]]:
        """(parameter, elements of the memory that its shard is gathered from)."""
        return [(p.sharded_param, p.padded_sharded_param_size.numel()) for p in self.group.fsdp_params]

    def buffers(self) -> list[tuple[Any, Tensor]]:
        """(parameter, the flat padded memory that its shard is gathered from)."""
        return [(p.sharded_param, p._sharded_param_data) for p in self.group.fsdp_params]


def _nothing() -> None:
    pass


def gather_group(module: FSDPModule) -> GatherGroup | None:
    """None where the module has no parameters of its own."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and newer; one each, as fullshard shards
    if groups is not None:
        return GatherGroup(groups[0]) if groups else None
    return GatherGroup(state._fsdp_param_group) if state._fsdp_param_group else None


@cache
def keep_reductions_off_the_bus() -> None:
    """FSDP lays gradients out for their reduction with a kernel whose table of addresses it uploads each time, on the stream
    that computes. Beside an optimizer that fills the bus, backward would wait at every unit for that upload. The same
    layout by plain copies needs none."""
    _fsdp_collectives.foreach_reduce_scatter_copy_in = partial(_lay_out, _fsdp_collectives.foreach_reduce_scatter_copy_in)


def _lay_out(stock: Callable[..., None], gradients: list[Tensor], flat: Tensor, ranks: int) -> None:
    if not flat.is_cuda or any(g.ndim == 0 or g.size(0) % ranks for g in gradients):
        return stock(gradients, flat, ranks)
    parts = flat.view(ranks, -1).split([g.numel() // ranks for g in gradients], dim=1)
    _foreach_copy_(list(parts), [g.reshape(ranks, -1) for g in gradients])
