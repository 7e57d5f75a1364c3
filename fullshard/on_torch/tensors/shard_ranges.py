"""The range of a sharded tensor that this rank has."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.on_torch.private.torch_internals import dtensor_like, sharded_dim
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


def local(tensor: Tensor) -> Tensor:
    """This rank's part, without autograd."""
    return local_tensor(tensor).detach()


def shadow(p: nn.Parameter, part: Tensor) -> Tensor:
    """A tensor cut like `p`, of which this rank's part is `part`, on any device."""
    return dtensor_like(p, part) if isinstance(p, DTensor) else part


def part_of(value: Tensor, p: nn.Parameter) -> Tensor:
    """This rank's part of a value for `p`: a tensor cut like it or otherwise, or a whole one."""
    if isinstance(value, DTensor) and isinstance(p, DTensor):
        same = value.device_mesh == p.device_mesh and value.placements == p.placements
        return local(value if same else value.redistribute(p.device_mesh, p.placements))
    return local_part(value.detach(), p) if isinstance(p, DTensor) else value.detach()
