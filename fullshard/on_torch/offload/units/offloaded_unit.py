"""Offloaded units: their parameters, the pieces that their updates are cut into, and one record of each unit's progress.

A unit is offloaded if its parameters or its optimizer state have another home than the device. Its master copy and moments
lie in flat memory or in a file: trained parameters first, in the order of the optimizer's groups. FSDP gathers from a copy
in the compute dtype. Two stores hold the bytes (`stores`); the lanes update them (`updates`).
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.on_torch.optimizers.moment_codes import ElementRange
from fullshard.on_torch.private.fsdp_groups import GatherGroup
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES
from fullshard.on_torch.tensors.shard_ranges import local
from fullshard.on_torch.tensors.streams import DONE, StreamEvent
from fullshard.plan.plan import Home, Plan, Unit
from fullshard.plan.update_pieces import Lane, cut

if TYPE_CHECKING:
    from fullshard.on_torch.offload.units.store_protocols import ParameterStore, StateStore
    from fullshard.on_torch.offload.units.unit_update import UnitUpdate


@dataclass(frozen=True)
class Segment:
    """A run of one parameter's elements inside a piece."""

    parameter: int  # index in the unit
    start: int  # in this rank's part of the parameter, flat
    stop: int
    offset: int  # in the piece
    shape: torch.Size  # of this rank's part of the parameter

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.shape.numel()


@dataclass
class Piece:
    """A part of a unit's flat state that is updated at once. `number` counts all pieces of a rank in forward order."""

    unit: "OffloadedUnit"
    number: int
    start: int  # in the unit's flat memory
    stop: int
    segments: list[Segment]
    lane: Lane = "gpu"
    packed: bool = False  # only the low 16 bits of its fp32 master are stored
    paired: bool = False  # packed, and its bf16 parameters lie in the other half of the master's memory

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def segment_views(self, memory: Tensor, *, flat: bool = False) -> list[Tensor]:
        """Its segments in flat memory. Whole parameters keep their shape, as their gradients have it, unless `flat`."""
        found = [memory[s.offset : s.offset + s.stop - s.start] for s in self.segments]
        if flat:
            return found
        return [part.view(s.shape) if s.whole else part for part, s in zip(found, self.segments, strict=True)]


@dataclass(eq=False)
class OffloadedUnit:
    """One offloaded unit of this rank: its parameters, where their bytes are, and how far its update has come."""

    name: str
    home: Home
    names: list[str]  # of the parameters
    params: list[nn.Parameter]
    trained: int  # the first so many parameters are trained, the others frozen
    padded: list[int]  # elements of the memory that FSDP gathers each parameter from
    group: GatherGroup
    grain: int = 1  # every parameter begins at a multiple of it in the flat memory
    spans: list[tuple[int, int]] = field(default_factory=list)  # of each parameter in the flat memory
    starts: list[int] = field(default_factory=list)  # of each parameter there, and the end of the last
    pieces: list[Piece] = field(default_factory=list)
    state: "StateStore" = field(init=False)
    shards: "ParameterStore" = field(init=False)
    fetched: StreamEvent = DONE  # its shards are on the device, for one gather
    # What the optimizer knows of it.
    ranges: list[ElementRange] = field(default_factory=list)  # of the parameters, if their moments are low-bit
    steps: list[int] = field(default_factory=list)  # updates so far, by trained parameter
    settings: list[int] = field(default_factory=list)  # index of the optimizer's parameter group, by trained parameter
    arrived: set[int] = field(default_factory=set)  # trained parameters whose gradients are there in this step
    norms: dict[int, Tensor] = field(default_factory=dict)  # of this rank's gradients in this step, by parameter
    update: "UnitUpdate | None" = None  # the last one
    next_update: "UnitUpdate | None" = None  # one that waits for the gradient norm

    def __post_init__(self) -> None:
        at = 0
        for p in self.params:
            size = local(p).numel()
            self.spans.append((at, at + size))
            at += -(-size // self.grain) * self.grain
        self.starts = [*(low for low, _ in self.spans), at]
        self.steps = [0] * self.trained

    @property
    def elements(self) -> int:
        """Of the flat master."""
        return self.starts[-1]

    @property
    def moving(self) -> int:
        """Elements of the trained parameters, which have moments."""
        return self.starts[self.trained]

    def segments(self, start: int, stop: int) -> list[Segment]:
        found = []
        for i, (low, high) in enumerate(self.spans[: self.trained]):
            a, b = max(low, start), min(high, stop)
            if a < b:
                found.append(Segment(i, a - low, b - low, a - start, local(self.params[i]).shape))
        return found

    def view(self, flat: Tensor, index: int) -> Tensor:
        """A parameter's part of flat memory, in its shape."""
        low, high = self.spans[index]
        return flat[low:high].view(local(self.params[index]).shape)


def is_offloaded(unit: Unit) -> bool:
    return unit.home.optimizer != "device" or unit.home.params != "device"


def offloaded_units(model: nn.Module, plan: Plan, groups: dict[str, GatherGroup]) -> list[OffloadedUnit]:
    """The plan's offloaded units with their parameters and pieces. Matrices, which are decayed, come before the others."""
    found, by_unit = [], defaultdict(list)
    for n, p in model.named_parameters():
        if unit := plan.unit_of(n):
            by_unit[unit.name].append((n, p))
    for unit in filter(is_offloaded, plan.units):
        own = by_unit[unit.name]
        own.sort(key=lambda pair: (not pair[1].requires_grad, pair[1].ndim < 2))
        if own:
            group = groups[unit.name]
            sizes = {id(p): size for p, size in group.padded()}
            trained, padded = sum(p.requires_grad for _, p in own), [sizes[id(p)] for _, p in own]
            named = ([n for n, _ in own], [p for _, p in own])
            found.append(OffloadedUnit(unit.name, unit.home, *named, trained, padded, group, plan.precision.moment_grain))
    number = 0
    for offloaded in found:
        for start, stop in cut(offloaded.moving):
            offloaded.pieces.append(Piece(offloaded, number, start, stop, offloaded.segments(start, stop)))
            number += 1
    return found


def refuse_unfrozen(units: list[OffloadedUnit]) -> None:
    """Raise if a parameter was unfrozen since `shard`: its unit has no optimizer state for it."""
    for unit in units:
        for name, p in zip(unit.names[unit.trained :], unit.params[unit.trained :], strict=True):
            if p.requires_grad:
                raise FullshardError(
                    f"{name} was unfrozen after shard(), which made no optimizer state for it in the home of unit {unit.name}; "
                    "call requires_grad_(True) before shard(), or give that unit the home 'device'"
                )


def gradient_dtype(plan: Plan) -> torch.dtype:
    """Of the gradients of an offloaded unit."""
    return PLAN_DTYPES[plan.offloaded_gradients]
