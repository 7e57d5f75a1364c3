"""Scalar parameters, such as CLIP's temperature. FSDP shards none, so the state holds each as a vector of one element. The model
computes with a scalar, and files have one."""

from torch import Tensor, nn

from fullshard.on_torch.model.tied_parameters import parameter_names
from fullshard.on_torch.private.fsdp_groups import Owner


def scalar_names(model: nn.Module) -> frozenset[str]:
    """All names of the parameters that are scalars."""
    names = parameter_names(model)
    return frozenset(n for p in model.parameters() if p.ndim == 0 for n in names[id(p)])


def as_vector(tensor: Tensor) -> Tensor:
    """A tensor of the model as the state has it."""
    return tensor.reshape(1) if isinstance(tensor, nn.Parameter) and tensor.ndim == 0 else tensor


def make_vectors(model: nn.Module) -> set[Owner]:
    """Make scalar parameters vectors, in place, so that tied ones stay tied. Returns where they are."""
    found = {(m, n) for m in model.modules() for n, p in m._parameters.items() if p is not None and p.ndim == 0}
    for module, name in found:
        p = getattr(module, name)
        p.data = p.data.reshape(1)
    return found
