"""A moment of bytes, read as fp32 values: for checkpoints, a part at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.on_torch.optimizers.moment_codes import MomentFormat
from fullshard.plan.choices import BLOCK

PART = 1 << 22  # elements that are decoded at a time
WIDE = 4  # bytes of an fp32 value


@dataclass(frozen=True)
class DecodedMoment:
    """One parameter's moment on this rank. `raw`: its stored bytes from one element, at the start of a block, to another."""

    raw: Callable[[int, int], Tensor]
    moments: MomentFormat
    signed: bool

    def read(self, start: int, into: Tensor) -> None:
        """Fill `into` with the bytes of its fp32 values from `start` on."""
        end = start + len(into)
        for low in range(start // WIDE // BLOCK * BLOCK, -(-end // WIDE), PART):
            high = min(low + PART, -(-end // WIDE))
            values = self.moments.decode(self.raw(low, high), high - low, signed=self.signed)
            first, last = max(low * WIDE, start), min(high * WIDE, end)
            part = values.view(torch.uint8)[first - low * WIDE : last - low * WIDE]
            into[first - start : last - start].copy_(part)
