"""A log of the collectives that ran, with their sizes in bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from fullshard.on_torch.private.torch_internals import TorchDispatchMode, group_size

CollectiveName = Literal["gather", "reduce", "all_reduce", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class LoggedCollective:
    """One collective. `nbytes` is the size of the full tensor: the output of a gather, else the input."""

    kind: CollectiveName
    nbytes: int
    ranks: int
    dtype: torch.dtype


@dataclass
class Traffic:
    """Collectives in the order they were issued. Those of a single-rank group are left out: they move nothing."""

    collectives: list[LoggedCollective] = field(default_factory=list)

    def nbytes(self, kind: CollectiveName) -> int:
        return sum(c.nbytes for c in self.collectives if c.kind == kind)

    def count(self, kind: CollectiveName) -> int:
        return sum(c.kind == kind for c in self.collectives)


@contextmanager
def record() -> Iterator[Traffic]:
    """Record the collectives issued inside the context, in forward and in backward."""
    traffic = Traffic()
    with _Recorder(traffic):
        yield traffic


class _Recorder(TorchDispatchMode):
    def __init__(self, traffic: Traffic):
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _read(func, args)
        if found is not None and found.ranks > 1:
            self.traffic.collectives.append(found)
        return func(*args, **(kwargs or {}))


def _read(func: Any, args: Any) -> LoggedCollective | None:
    """The collective behind an operator call; None for any other operator."""
    match getattr(func, "_schema", None) and func._schema.name:
        case "c10d::_allgather_base_":
            return _logged("gather", args[2], args[0])
        case "c10d::_reduce_scatter_base_":
            return _logged("reduce", args[2], args[1])
        case "c10d::allreduce_":
            return _logged("all_reduce", args[1], args[0][0])
        case "c10d::broadcast_":  # of buffers by DDP
            return _logged("broadcast", args[1], args[0][0])
        case "c10d::allgather_":  # this and the next two: with a tensor for each rank, as other systems call them
            return _logged("gather", args[2], *args[0][0])
        case "c10d::reduce_scatter_":
            return _logged("reduce", args[2], *args[1][0])
        case "c10d::allgather_into_tensor_coalesced_":
            return _logged("gather", args[2], *args[0])
        case "c10d::alltoall_base_":
            return _logged("all_to_all", args[2], args[1])
        case "_c10d_functional::all_gather_into_tensor":
            return LoggedCollective("gather", args[0].nbytes * args[1], args[1], args[0].dtype)
        case "_c10d_functional::reduce_scatter_tensor":
            return LoggedCollective("reduce", args[0].nbytes, args[2], args[0].dtype)
        case "_c10d_functional::all_reduce" | "_c10d_functional::all_reduce_":
            return LoggedCollective("all_reduce", args[0].nbytes, group_size(args[2]), args[0].dtype)
        case "_c10d_functional::all_to_all_single":
            return LoggedCollective("all_to_all", args[0].nbytes, group_size(args[3]), args[0].dtype)
    return None


def _logged(kind: CollectiveName, boxed: Any, *tensors: torch.Tensor) -> LoggedCollective:
    """`boxed`: the process group, as operators are given it."""
    ranks = dist.ProcessGroup.unbox(boxed).size()
    return LoggedCollective(kind, sum(t.nbytes for t in tensors), ranks, tensors[0].dtype)
