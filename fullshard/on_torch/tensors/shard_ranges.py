"""The range of a sharded tensor that this rank has."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.on_torch.private.torch_internals import sharded_dim
from fullshard.on_torch.tensors.watched_shard import plain_shard


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return plain_shard(tensor.to_local()) if isinstance(tensor, DTensor) else tensor


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """The part of `full` that `like` has on this rank."""
    return full[tuple(slice(*span) for span in local_box(like))]


def local_box(tensor: Tensor) -> list[tuple[int, int]]:
    """(start, stop) in each dim of this rank's part of a tensor.

    The tensor axis splits first, then the shard axis splits the result (DTensor calls this strided if both split the same
    dim). Splits are those of `torch.chunk`: the last ranks may have a smaller part, or none.
    """
    box = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return box
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the mesh"
    for axis in reversed(range(tensor.device_mesh.ndim)):
        if (dim := sharded_dim(tensor.placements[axis])) is not None:
            box[dim] = _chunk(*box[dim], tensor.device_mesh.size(axis), coordinate[axis])
    return box


def _chunk(start: int, stop: int, count: int, index: int) -> tuple[int, int]:
    size = -(-(stop - start) // count)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)
