"""The kernel of a low-bit update: Triton's on a GPU, if it gives torch's bits, else torch's."""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fullshard.on_torch.optimizers.low_bit_update import LowBitRule
from fullshard.on_torch.optimizers.moment_codes import ElementRange
from fullshard.on_torch.tensors.usable_kernel import Found, usable_kernel


def update_low_bit(
    how: LowBitRule,
    master: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    step: int,
    group: dict[str, Any],
    elements: ElementRange,
    factors: Sequence[float | Tensor] = (),
    start: int = 0,
) -> None:
    """As `LowBitRule.update_by_torch`, by the best kernel there is."""
    kernel = find_low_bit(how, master.dtype)[0] if master.is_cuda else None
    if kernel is None:
        return how.update_by_torch(master, gradient, moments, step, group, elements, factors, start)
    steps, off = torch.full((), float(step), device=master.device), torch.zeros((), device=master.device)
    scale = torch.stack([torch.as_tensor(f, device=master.device).float() for f in factors]) if factors else None
    powers = kernel.step_powers([steps], group)[0]
    kernel.update_low_bit(how, (master, gradient, *moments), scale, off, powers, steps, group, elements, start)


@cache
def find_low_bit(how: LowBitRule, master: torch.dtype) -> Found:
    """The module `triton_low_bit`, or None and the reason."""

    def find() -> ModuleType | None:
        from fullshard.on_torch.optimizers import triton_low_bit

        return triton_low_bit if triton_low_bit.gives_torchs_bits(how, master, torch.device("cuda")) else None

    return usable_kernel("the update of low-bit state", find)
