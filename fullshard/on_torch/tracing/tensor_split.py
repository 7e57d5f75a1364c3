"""Split a copy of a model on meta over a tensor axis, for tracing. Needs no other ranks."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.errors import FullshardError
from fullshard.model.description import Description
from fullshard.on_torch.private import fake_ranks, inner
from fullshard.on_torch.tensor_parallel import refuse_split, split_units


@contextmanager
def split(model: nn.Module, description: Description, tensor: int) -> Iterator[nn.Module]:
    """A copy of `model` on meta, split over `tensor` ranks as the engine splits it, valid inside the context."""
    refuse_split(model, description.units, tensor)
    if dist.is_initialized():
        raise FullshardError(
            f"a tensor axis of {tensor} cannot be traced among running ranks; describe the model before they start"
        )
    part = _on_meta(model)
    with fake_ranks(tensor):
        mesh = init_device_mesh("cpu", (tensor,), mesh_dim_names=("tensor",))
        split_units(part, description.units, tensor, [mesh] * len(description.units))
        yield part


def part_shapes(part: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters on one rank."""
    return {name: tuple(inner(p).shape) for name, p in part.named_parameters()}


def _on_meta(model: nn.Module) -> nn.Module:
    known: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    known |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, known)
