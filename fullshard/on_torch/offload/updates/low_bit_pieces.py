"""Updates of pieces whose moments are stored in few bits, for both lanes: one call for each run of one parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fullshard.on_torch.offload.units.offloaded_unit import Piece, Segment
from fullshard.on_torch.offload.units.unit_update import UnitUpdate
from fullshard.on_torch.optimizers.low_bit_kernel import update_low_bit
from fullshard.on_torch.optimizers.low_bit_update import LowBitRule, element_range
from fullshard.on_torch.optimizers.moment_codes import ElementRange

CHUNK = 1 << 20  # elements of a call to the CPU: milliseconds; whole blocks
GPU_CHUNK = 1 << 26  # of a call to a GPU: more than a piece has


@dataclass(eq=False)
class LowBitPiece:
    """The update of one piece. `rounded`: memory for the new parameters in the compute dtype, if they are wanted. `factors`: on
    the gradient, one after the other."""

    how: LowBitRule
    state: Sequence[Tensor]
    gradient: Tensor
    rounded: Tensor | None
    factors: Sequence[float | Tensor] = ()

    def calls(self, update: UnitUpdate, piece: Piece) -> list[tuple[Any, ...]]:
        """The arguments of each `run`. Parameters without a gradient are left out."""
        found: list[tuple[Any, ...]] = []
        size = CHUNK if self.state[0].device.type == "cpu" else GPU_CHUNK
        for s in piece.segments:
            if update.had[s.parameter]:
                place, step, group = ranges(piece)[s.parameter], update.steps[s.parameter], update.groups[s.parameter]
                for at in range(0, s.stop - s.start, size):
                    found.append((s, at, min(at + size, s.stop - s.start), place, step, group))
        return found

    def run(self, s: Segment, low: int, high: int, place: ElementRange, step: int, group: dict[str, Any]) -> None:
        """Update the elements of a segment from `low` to `high`."""
        start, stop = s.offset + low, s.offset + high
        master, gradient = self.state[0][start:stop], self.gradient[start:stop]
        moments = [self.how.moments.part(t, start, stop) for t in self.state[1:]]
        update_low_bit(self.how, master, gradient, moments, step, group, place, self.factors, s.start + low)
        if self.rounded is not None:
            self.rounded[start:stop] = master


def ranges(piece: Piece) -> list[ElementRange]:
    """Which elements of each parameter of the piece's unit this rank has."""
    unit = piece.unit
    if not unit.ranges:
        unit.ranges = [element_range(name, p) for name, p in zip(unit.names, unit.params, strict=True)]
    return unit.ranges
