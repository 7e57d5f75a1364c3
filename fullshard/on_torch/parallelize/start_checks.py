"""Checks of `shard`: every rank has the same values, and each value is set."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.on_torch.model.initialize import refuse_unset
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.tensors.shard_ranges import local_tensor


class CheckError(FullshardError):
    """A mistake that would make a run train silently wrong."""


def refuse_unset_anywhere(names: list[str]) -> None:
    """As `refuse_unset`, for the names of all ranks. Collective."""
    refuse_unset(sorted({name for found in of_all_ranks(names) for name in found}))


def refuse_anywhere(fault: str | None) -> None:
    """Raise on all ranks if one has a fault: the lowest such rank's. Collective."""
    for sentence in of_all_ranks(fault):
        if sentence is not None:
            raise CheckError(sentence)


def remember_random_frozen(state: State, names: list[str]) -> None:
    """Keep checksums of randomly initialised frozen parameters, if they outnumber the trained ones.

    This is what adapters on a base model without weights look like. `check_frozen_loaded` compares the checksums at the
    first step, to see whether the base was loaded since.
    """
    sizes = {n: p.numel() for n, p in state.model.named_parameters()}
    trained = sum(p.numel() for p in state.model.parameters() if p.requires_grad)
    if state.checks and trained and sum(sizes[n] for n in names) > trained:
        with state.values() as values:
            state.drawn = {n: checksum_of(values[n]) for n in names}


def check_values_agree(model: nn.Module) -> None:
    """Check, before sharding, that parameters with values have the same values on all ranks."""
    found = of_all_ranks({n: checksum_of(p) for n, p in model.named_parameters() if not p.is_meta})
    for name in found[0]:
        if any(other.get(name) != found[0][name] for other in found):
            raise CheckError(
                f"{name} has different values on different ranks; load the same weights, seed all ranks alike, or write "
                "shard(..., broadcast=True) to give all ranks those of rank 0"
            )


def of_all_ranks(value: object) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def checksum_of(tensor: Tensor) -> int:
    """The sum of this rank's part, read as integers. Computed on the tensor's device, without a copy."""
    local = local_tensor(tensor).detach()
    local = local if local.layout is torch.strided else local.to_dense()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    return int(local.contiguous().view(words).sum(dtype=torch.int64))
