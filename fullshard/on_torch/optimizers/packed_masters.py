"""Packed masters: the low 16 bits of each fp32 value, beside its bf16 parameter. Exact, in 10 bytes of state instead of 12.

An fp32 value is its bf16 rounding plus its low 16 bits, which also tell in which direction it was rounded. A value in the
middle between two bf16 values is rounded to the even one, from above or from below. The sign of the second moment, which is
never negative, stores which.
"""

import torch
from torch import Tensor

MIDDLE = -(1 << 15)  # the low half of a value in the middle, as a signed number
HIGH = 1 << 16  # one in the high half


def halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """A flat master's memory as two parts: low halves, then bf16 parameters."""
    both = master.view(torch.int16)
    return both[: master.numel()], both[master.numel() :].view(torch.bfloat16)


def pack(master: Tensor, rounded: Tensor, low: Tensor, second: Tensor) -> None:
    """Fill `low` from `master`, and set the signs of `second`. `rounded`: the master in bf16. All are flat."""
    words = master.view(torch.int16).view(-1, 2)  # low, high
    low.copy_(words[:, 0])
    from_above = (low == MIDDLE).logical_and_(rounded.view(torch.int16) == words[:, 1])
    torch.copysign(second, torch.where(from_above, -1.0, 1.0), out=second)


def unpack(rounded: Tensor, low: Tensor, second: Tensor, master: Tensor) -> None:
    """Fill `master`, and remove the signs from `second`."""
    from_above = (low == MIDDLE).logical_and_(second.signbit())
    bits = master.view(torch.int32)
    bits.copy_(low)
    bits.add_(rounded.view(torch.int16), alpha=HIGH)
    bits.add_(from_above, alpha=HIGH)
    second.abs_()
