"""`save_pretrained` of a sharded model: the library's own, on rank 0, over tensors that are gathered as they are written.

Every rank calls it. Rank 0 runs the library's code on a model that shows whole tensors, each of which is gathered when the
library writes it to a file. So files, names, options and configs are the library's own, and rank 0 holds one file's tensors.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fullshard.base.errors import FullshardError
from fullshard.on_torch.model.batch_norm import average_statistics
from fullshard.on_torch.model.borrowed_parameters import borrowed_parameters
from fullshard.on_torch.offload.state_dict_hooks import copied
from fullshard.on_torch.offload.units.weak_hooks import gone
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.ranks.gather_tensors import TensorGather
from fullshard.on_torch.ranks.rank_agreement import GroupAgreement
from fullshard.on_torch.ranks.store_messages import StoreClient
from fullshard.on_torch.tensors.deferred_tensor import DeferredTensor

PATIENCE = 30.0  # seconds that rank 0 waits for the others, which have no reason to come late
FIRST_RANKS = 600.0  # seconds that they wait for rank 0, which may have been writing something else
METHODS = ("save_pretrained", "push_to_hub")  # the second calls the first
Call = Callable[..., Any]
_calls = count()


def save_together(state: State) -> None:
    """Make these methods of the model, and of the models inside it, collective."""
    saves = _Saves(state)
    for module in state.model.modules():
        for name in METHODS:
            if callable(getattr(type(module), name, None)):
                own = getattr(module, name)
                setattr(module, name, functools.wraps(own)(partial(saves.call, own)))


class _Saves:
    """The calls on one state's model. `inside`: rank 0 is in one, and what it calls in turn is the library's own."""

    def __init__(self, state: State):
        self.found, self.inside = weakref.ref(state), False

    def call(self, own: Call, *args: Any, **kwargs: Any) -> Any:
        if self.inside:
            return own(*args, **kwargs)
        state, given = self.found(), _argument(own, args, kwargs, "state_dict")
        if state is None:
            raise gone()
        if _argument(own, args, kwargs, "distributed_checkpoint"):
            raise FullshardError(
                f"{own.__name__}: leave distributed_checkpoint out; fullshard.checkpoint.save writes every shard"
            )
        if given is not None and not any(isinstance(t, DTensor) for t in given.values()):
            return self._of_whole(state, own, args, kwargs, given)
        return self._together(state, own, args, kwargs, given)

    def _of_whole(self, state: State, own: Call, args: Any, kwargs: Any, given: Mapping[str, Any]) -> Any:
        """Save a state dict of whole tensors. Not collective: usually rank 0 alone has one, and the others an empty one."""
        if not given and dist.get_rank():
            return None
        with state.values(at_rest=True) as values:
            return self._run(state, {n: _deferred(state, n, t, _unreadable) for n, t in values.items()}, own, args, kwargs)

    def _together(self, state: State, own: Call, args: Any, kwargs: Any, given: Mapping[str, Any] | None) -> Any:
        _meet(own.__name__, state.device)
        average_statistics(state.model)
        state.copies.rest()
        state.copies.free()  # else FSDP's hook on `state_dict` does so, and puts its shards in place of what is shown
        ranks, result = GroupAgreement(), None
        with torch.no_grad(), state.values(at_rest=True) as values:
            sharded = {n: t for n, t in (given or values).items() if isinstance(t, DTensor)}
            names, own_parameters = sorted(sharded), dict(state.model.named_parameters())
            read = lambda i: _in_memory(state, own_parameters.get(names[i]), sharded[names[i]])
            gather = TensorGather(ranks, [sharded[n] for n in names], read)
            if dist.get_rank():
                gather.serve()
            else:
                fetched = {n: _deferred(state, n, sharded[n], partial(gather.fetch, i)) for i, n in enumerate(names)}
                shown = {**values, **fetched}
                if given is not None:
                    args, kwargs = _replaced(own, args, kwargs, "state_dict", {**given, **fetched})
                    shown = {n: _deferred(state, n, t, _unreadable) for n, t in values.items()}
                try:
                    result = self._run(state, shown, own, args, kwargs)
                except BaseException as error:
                    gather.fail(error)
                    raise
                gather.finish()
        ranks.close()
        return result

    def _run(self, state: State, tensors: Mapping[str, Tensor], own: Call, args: Any, kwargs: Any) -> Any:
        self.inside = True
        try:
            with unsharded(state.model, tensors):
                return own(*args, **kwargs)
        finally:
            self.inside = False


# -- what rank 0 shows ---------------------------------------------------------------------------------------


@contextmanager
def unsharded(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model has these tensors in place of its shards, and its modules the classes from before they were sharded:
    libraries look up rules of their own by class."""
    shown = {id(p): tensors[n] for n, p in model.named_parameters()}
    with ExitStack() as stack:
        for module in list(model.modules()):
            own = {n: shown[id(p)] for n, p in module._parameters.items() if p is not None}
            stack.enter_context(borrowed_parameters(module, own))
            stack.enter_context(_plain_class(module))
        yield


@contextmanager
def _plain_class(module: nn.Module) -> Iterator[None]:
    kind = type(module)
    plain: Any = next(k for k in kind.__mro__ if not issubclass(k, FSDPModule))
    module.__class__ = plain
    try:
        yield
    finally:
        module.__class__ = kind


def _deferred(state: State, name: str, tensor: Tensor, read: Callable[[], Tensor]) -> DeferredTensor:
    shape = torch.Size(()) if name in state.scalars else tensor.shape
    whole = lambda: read().reshape(shape)
    return DeferredTensor.make(torch.empty(shape, dtype=tensor.dtype, device="meta"), whole, parameter=True)


def _unreadable() -> Tensor:
    raise FullshardError("state_dict lacks a tensor of the model; leave state_dict out, and call save_pretrained on all ranks")


def _in_memory(state: State, parameter: nn.Parameter | None, master: Tensor) -> Tensor:
    """A parameter's master, read from disk if it rests there."""
    if state.offload is None or parameter is None or not master.is_meta:
        return master
    unit, index = state.offload.unit_of(parameter)
    return copied(state.offload, unit, index, 0)


def _argument(own: Call, args: Any, kwargs: Any, name: str) -> Any:
    return {**inspect.signature(own).bind_partial(*args, **kwargs).arguments, **kwargs}.get(name)


def _replaced(own: Call, args: Any, kwargs: Any, name: str, value: Any) -> tuple[Any, Any]:
    """The arguments with another value for one that was given."""
    if name in kwargs:
        return args, kwargs | {name: value}
    place = list(inspect.signature(own).parameters).index(name)
    return (*args[:place], value, *args[place + 1 :]), kwargs


# -- whether all ranks came ------------------------------------------------------------------------------------


def _meet(call: str, device: torch.device) -> None:
    """Return once every rank has called this. Otherwise raise: a collective would wait for the others in vain."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # then no rank is still in the last step
    rank, world, client, key = dist.get_rank(), dist.get_world_size(), StoreClient(), f"{call}/{next(_calls)}"
    client.put(f"{key}/{rank}", True)
    if rank == 0:
        came = client.collect(key, range(world), PATIENCE)
        missing = sorted(set(range(world)) - set(came))
        client.put(f"{key}/verdict", _absent(call, missing) if missing else "")
    verdict = client.wait(lambda: client.get(f"{key}/verdict"), FIRST_RANKS)
    if verdict is None:
        raise FullshardError(f"{call}: rank 0 did not call it within {FIRST_RANKS:g} seconds; call it on every rank")
    if verdict:
        raise FullshardError(verdict)


def _absent(call: str, ranks: list[int]) -> str:
    named = f"rank {ranks[0]}{f' and {len(ranks) - 1} more' if len(ranks) > 1 else ''}"
    return (
        f"{call}: {named} did not call it within {PATIENCE:g} seconds of rank 0, but every rank holds a part of the weights; "
        "call it on all ranks, not under `if rank == 0` (rank 0 alone writes the files)"
    )
