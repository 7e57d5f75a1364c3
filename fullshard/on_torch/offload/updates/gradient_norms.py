"""Norms of the gradients of offloaded units, taken as they arrive: what comes after may have moved them to the host."""

import torch
from torch import Tensor

from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit
from fullshard.on_torch.optimizers.sharded_optimizer import local_norms, replicas_of, sum_of_squares


def take_norms(unit: OffloadedUnit, gradients: list[Tensor | None]) -> None:
    """Keep the norms of a unit's gradients until the next step. `gradients`: by trained parameter."""
    there = [(i, g) for i, g in enumerate(gradients) if g is not None]
    if there:
        norms = local_norms([g for _, g in there])
        unit.norms = {i: norm for (i, _), norm in zip(there, norms, strict=True)}


def received_norms(units: list[OffloadedUnit]) -> dict[str, list[Tensor]]:
    """The norms of this rank's gradients in this step, by unit."""
    return {unit.name: list(unit.norms.values()) for unit in units if unit.norms}


def square_norm(units: list[OffloadedUnit], device: torch.device) -> Tensor:
    """This rank's share of the squared norm of offloaded gradients; see `sharded_optimizer.square_norm`."""
    found: dict[int, list[Tensor]] = {}
    for unit in units:
        for i, norm in sorted(unit.norms.items()):
            found.setdefault(replicas_of(unit.params[i]), []).append(norm)
    shares = [sum_of_squares(norms) / replicas for replicas, norms in found.items()]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64, device=device)
