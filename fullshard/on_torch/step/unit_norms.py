"""Gradient norms by unit, on shards: this rank's shares, which travel with the sums that a step reduces anyway."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fullshard.on_torch.optimizers.sharded_optimizer import local_norms, replicas_of
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.tensors.shard_ranges import local_tensor


def trained_units(state: State) -> list[str]:
    """The units that have parameters to train, in the plan's order; the same on all ranks."""
    found = {_unit_of(state, name) for name, p in state.model.named_parameters() if p.requires_grad}
    return [unit.name for unit in state.plan.units if unit.name in found]


def unit_squares(state: State, units: list[str]) -> Tensor:
    """This rank's share of each unit's squared gradient norm. The sum over all ranks is the squared norm, on any mesh."""
    place = {name: i for i, name in enumerate(units)}
    found = [*_resident(state), *_offloaded(state)]
    squares = torch.zeros(len(units), dtype=torch.float64, device=state.device)
    if not found:
        return squares
    norms = torch.stack([norm.double() for _, _, norm in found])
    shares = torch.tensor([1.0 / replicas for _, replicas, _ in found], dtype=torch.float64)
    index = torch.tensor([place[unit] for unit, _, _ in found])
    return squares.index_add_(0, index.to(state.device), norms.square() * shares.to(state.device))


def _resident(state: State) -> Iterator[tuple[str, int, Tensor]]:
    """Unit, replicas and local norm of each gradient on the device."""
    offload = state.offload
    held = [(n, p.grad) for n, p in state.model.named_parameters() if p.grad is not None and not (offload and offload.holds(p))]
    norms = local_norms([local_tensor(grad) for _, grad in held])
    yield from ((_unit_of(state, n), replicas_of(g), norm) for (n, g), norm in zip(held, norms, strict=True))


def _offloaded(state: State) -> Iterator[tuple[str, int, Tensor]]:
    """The same of offloaded units, whose norms were taken when their gradients arrived."""
    for unit in state.offload.units if state.offload else ():
        yield from ((unit.name, replicas_of(unit.params[i]), norm) for i, norm in unit.norms.items())


def _unit_of(state: State, parameter: str) -> str:
    unit = state.plan.unit_of(parameter)
    assert unit is not None, parameter
    return unit.name
