"""A master copy in half its bytes, where its rounding is at hand: exact, in 10 bytes of state instead of 12.

An fp32 value is its bf16 rounding, which is there as the parameter, and its own low 16 bits: these tell which way it was
rounded. A value in the middle between two roundings has gone to the even one, from above or from below; which of the two
goes into the sign of the second moment, which has none of its own.
"""

import torch
from torch import Tensor

MIDDLE = -(1 << 15)  # the low half of such a value, as a signed number
HIGH = 1 << 16  # one in the high half


def halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of a flat master for its low halves and, after all of them, its roundings."""
    both = master.view(torch.int16)
    return both[: master.numel()], both[master.numel() :].view(torch.bfloat16)


def pack(master: Tensor, rounded: Tensor, low: Tensor, second: Tensor) -> None:
    """Fill `low` with what `rounded` does not say of `master`, and mark `second`, all of them flat."""
    words = master.view(torch.int16).view(-1, 2)  # low, high
    low.copy_(words[:, 0])
    from_above = (low == MIDDLE).logical_and_(rounded.view(torch.int16) == words[:, 1])
    torch.copysign(second, torch.where(from_above, -1.0, 1.0), out=second)


def unpack(rounded: Tensor, low: Tensor, second: Tensor, master: Tensor) -> None:
    """Fill `master`, and take the marks from `second`."""
    from_above = (low == MIDDLE).logical_and_(second.signbit())
    bits = master.view(torch.int32)
    bits.copy_(low)
    bits.add_(rounded.view(torch.int16), alpha=HIGH)
    bits.add_(from_above, alpha=HIGH)
    second.abs_()
