"""The private parts of torch that the engine touches, all of them, so that a new torch is one file to mend."""

from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "cut_dim", "group_size"]


def cut_dim(placement: Placement) -> int | None:
    """The dim that a placement cuts, if it cuts one. FSDP over a tensor axis cuts with strides, which in
    newer torch is no `Shard` any more."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def group_size(name: object) -> int:
    """How many ranks the process group of a functional collective has."""
    return _resolve_process_group(name).size()  # type: ignore[arg-type]
