"""Units that a plan sends away from the device: what of them rests where, and how it is cut.

An away unit has its master copy and moments in flat memory (or in a file), trained parameters first, in the order of
the optimizer's groups. What FSDP gathers from is a second copy in the compute dtype, or part of the first. Names, shapes
and spans live here; who moves and updates them is in `lanes` and `tiered`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.on_torch.dtypes import PLAN_DTYPES
from fullshard.on_torch.private import GatherGroup, dtensor_like
from fullshard.on_torch.shard_ranges import local_part
from fullshard.plan import Plan, Unit
from fullshard.update_pieces import Lane, cut


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
    """What is updated at once. `number` counts through all pieces in the order of forward."""

    away: "Away"
    number: int
    start: int  # in the unit's flat memory
    stop: int
    segments: list[Segment]
    lane: Lane = "gpu"
    packed: bool = False  # its master rests as what the parameter does not tell of it

    @property
    def paired(self) -> bool:
        """Whether it rests packed with its parameters beside it, in the master's memory."""
        return self.packed and self.away.unit.home.params == "host"

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass
class Away:
    """One unit away from the device."""

    unit: Unit
    names: list[str]
    params: list[nn.Parameter]
    trained: int  # so many of them, the first ones
    padded: list[int]  # elements of the memory that FSDP gathers each from
    spans: list[tuple[int, int]] = field(default_factory=list)  # of each parameter in the flat memory
    pieces: list[Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        at = 0
        for p in self.params:
            size = local(p).numel()
            self.spans.append((at, at + size))
            at += size

    @property
    def elements(self) -> int:
        return self.spans[-1][1] if self.spans else 0

    @property
    def moving(self) -> int:
        """Elements that have moments."""
        return self.spans[self.trained - 1][1] if self.trained else 0

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


def is_away(unit: Unit) -> bool:
    return unit.home.optimizer != "device" or unit.home.params != "device"


def away_units(model: nn.Module, plan: Plan, groups: dict[str, GatherGroup]) -> list[Away]:
    """The plan's away units with their parameters, those that are decayed (matrices) before the others."""
    found = []
    for unit in plan.units:
        own = [(n, p) for n, p in model.named_parameters() if is_away(unit) and plan.unit_of(n) is unit]
        own.sort(key=lambda pair: (not pair[1].requires_grad, pair[1].ndim < 2))
        if own:
            sizes = {id(p): size for p, size in groups[unit.name].padded()}
            trained = sum(p.requires_grad for _, p in own)
            found.append(Away(unit, [n for n, _ in own], [p for _, p in own], trained, [sizes[id(p)] for _, p in own]))
    number = 0
    for away in found:
        for start, stop in cut(away.moving):
            away.pieces.append(Piece(away, number, start, stop, away.segments(start, stop)))
            number += 1
    return found


def local(tensor: Tensor) -> Tensor:
    """This rank's part, without autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def shadow(p: nn.Parameter, part: Tensor) -> Tensor:
    """A tensor cut like `p`, of which this rank's part is `part`, wherever that lies."""
    return dtensor_like(p, part) if isinstance(p, DTensor) else part


def part_of(value: Tensor, p: nn.Parameter) -> Tensor:
    """This rank's part of a value for `p`: a tensor cut like it or otherwise, or a whole one."""
    if isinstance(value, DTensor) and isinstance(p, DTensor):
        same = value.device_mesh == p.device_mesh and value.placements == p.placements
        return local(value if same else value.redistribute(p.device_mesh, p.placements))
    return local_part(value.detach(), p) if isinstance(p, DTensor) else value.detach()


def gradient_dtype(plan: Plan) -> torch.dtype:
    """Of the gradients of an away unit."""
    return PLAN_DTYPES[plan.away_gradients]
