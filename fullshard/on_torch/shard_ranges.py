"""Which part of a tensor a rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.on_torch.private import cut_dim


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """The part of `full` that `like` holds on this rank."""
    return full[tuple(slice(*span) for span in local_box(like))]


def local_box(tensor: Tensor) -> list[tuple[int, int]]:
    """Start and stop, in each dim, of what this rank holds of a tensor.

    The tensor axis cuts first, the shard axis cuts what it left (DTensor calls that strided when both cut
    the same dim); cuts are `torch.chunk`'s, so the last ranks may hold less, or nothing.
    """
    box = [(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return box
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the mesh"
    for axis in reversed(range(tensor.device_mesh.ndim)):
        if (dim := cut_dim(tensor.placements[axis])) is not None:
            box[dim] = _chunk(*box[dim], tensor.device_mesh.size(axis), coordinate[axis])
    return box


def _chunk(start: int, stop: int, count: int, index: int) -> tuple[int, int]:
    size = -(-(stop - start) // count)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)
