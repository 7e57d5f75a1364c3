"""The private parts of torch that the engine touches, all of them, so that a new torch is one file to mend."""

from torch import _C, Tensor, empty, ones_like
from torch.autograd.graph import _engine_run_backward
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "cut_dim", "group_size", "run_backward", "sole_owner"]


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


def _owners(tensor: Tensor) -> int:
    return _C._storage_Use_Count(tensor.untyped_storage()._cdata)


def sole_owner(tensor: Tensor) -> bool:
    """Whether no other tensor shares this one's memory: what autograd asks before it adds in place."""
    return _owners(tensor) == _owners(empty(1, device=tensor.device))
