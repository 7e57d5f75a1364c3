"""How the master and the moments of offloaded units are stored: dtypes, lengths and parts of flat tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.on_torch.optimizers.moment_codes import NEAREST, MomentFormat
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES
from fullshard.plan.plan import Precision


@dataclass(frozen=True)
class StateLayout:
    """Of a flat master and `slots` flat moments."""

    master: torch.dtype
    moments: MomentFormat
    slots: int

    @classmethod
    def of(cls, precision: Precision, slots: int) -> "StateLayout":
        return cls(PLAN_DTYPES[precision.master], MomentFormat(precision.moment_kind), slots)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of the stored tensors."""
        return [self.master, *[self.moments.dtype] * self.slots]

    @property
    def shown(self) -> list[torch.dtype]:
        """In which whole units and checkpoints have them."""
        return [self.master, *[self.moments.saved] * self.slots]

    def lengths(self, elements: int, moving: int) -> list[int]:
        """Of the stored tensors. Frozen parameters, which are not `moving`, have no moments."""
        return [elements, *[self.moments.size(moving)] * self.slots]

    def nbytes(self, elements: int) -> list[int]:
        """Of the stored tensors of a piece."""
        lengths = self.lengths(elements, elements)
        return [n * dtype.itemsize for n, dtype in zip(lengths, self.dtypes, strict=True)]

    def slices(self, flats: list[Tensor], start: int, stop: int) -> list[Tensor]:
        """The parts of a piece, which begins at a multiple of the grain."""
        return [flats[0][start:stop], *(self.moments.part(t, start, stop) for t in flats[1:])]

    def decoded(self, flats: list[Tensor], moving: int) -> list[Tensor]:
        """The flat master, and moments as values; copies in host memory, if bytes are stored."""
        if not self.moments.coded:
            return flats
        return [flats[0], *(self.moments.decode(t, moving, signed=i == 0).cpu() for i, t in enumerate(flats[1:]))]

    def encode(self, values: list[Tensor], flats: list[Tensor]) -> None:
        """Store moments as `decoded` has them, rounded to the nearest where a code does not have them."""
        for i, (value, stored) in enumerate(zip(values[1:], flats[1:], strict=True)):
            self.moments.encode(value.to(stored.device), NEAREST, stored, signed=i == 0)
