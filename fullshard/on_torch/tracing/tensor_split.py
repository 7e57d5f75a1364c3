"""Split a copy of a model on meta over a tensor axis, or spread its experts, for tracing. Needs no other ranks."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.base.errors import FullshardError
from fullshard.model.description import Description
from fullshard.on_torch.parallelize.experts import refuse_uneven_experts, spread_experts
from fullshard.on_torch.parallelize.tensor_parallel import refuse_split, split_units
from fullshard.on_torch.private.torch_internals import fake_ranks, inner
from fullshard.plan.plan import SplitRules


@contextmanager
def split(model: nn.Module, description: Description, tensor: int, rules: SplitRules = ()) -> Iterator[nn.Module]:
    """A copy of `model` on meta, split over `tensor` ranks as the engine splits it, valid inside the context."""
    refuse_split(model, description.units, tensor, rules)
    _refuse_running_ranks(f"a tensor axis of {tensor}")
    part = _on_meta(model)
    with fake_ranks(tensor):
        mesh = init_device_mesh("cpu", (tensor,), mesh_dim_names=("tensor",))
        split_units(part, description.units, tensor, [mesh] * len(description.units), rules)
        yield part


@contextmanager
def spread(model: nn.Module, description: Description, expert: int) -> Iterator[nn.Module]:
    """A copy of `model` on meta, its experts spread over `expert` ranks as the engine spreads them, valid inside the context."""
    modules = [m for u in description.units if u.kind == "experts" for m in u.modules]
    if not modules:
        raise FullshardError(f"expert=({expert},) needs units of experts; describe the model with experts=True")
    refuse_uneven_experts(model, modules, expert)
    _refuse_running_ranks(f"an expert axis of {expert}")
    part = _on_meta(model)
    with fake_ranks(expert):
        mesh = init_device_mesh("cpu", (expert,), mesh_dim_names=("expert",))
        for path in modules:
            spread_experts(part.get_submodule(path), mesh)
        yield part


def _refuse_running_ranks(what: str) -> None:
    if dist.is_initialized():
        raise FullshardError(f"{what} cannot be traced among running ranks; describe the model before they start")


def part_shapes(part: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters on one rank."""
    return {name: tuple(inner(p).shape) for name, p in part.named_parameters()}


def _on_meta(model: nn.Module) -> nn.Module:
    known: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    known |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, known)
