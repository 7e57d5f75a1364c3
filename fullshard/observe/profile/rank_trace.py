"""What a profile knows of one rank, whichever engine traced it: spans of work, when which unit was at work, and memory."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from fullshard.observe.profile.intervals import Interval

SpanKind = Literal["compute", "gather", "reduce", "all_reduce", "all_to_all", "other collective", "to device", "from device"]
COLLECTIVES: tuple[SpanKind, ...] = ("gather", "reduce", "all_reduce", "all_to_all", "other collective")
TRANSFERS: tuple[SpanKind, ...] = ("to device", "from device")


@dataclass(frozen=True)
class WorkSpan:
    """Work of the device from `begin` to `end`, in seconds. `nbytes`: of the whole tensor of a collective between `ranks` ranks,
    or of a copy; 0 if unknown."""

    begin: float
    end: float
    kind: SpanKind
    name: str
    unit: str | None = None
    phase: str = ""
    nbytes: int = 0
    ranks: int = 0

    @property
    def interval(self) -> Interval:
        return self.begin, self.end


@dataclass(frozen=True)
class StepWindow:
    """One step: from asking for its data to having its loss. `data`: when it waited for data."""

    step: int
    begin: float
    end: float
    data: tuple[Interval, ...] = ()

    @property
    def interval(self) -> Interval:
        return self.begin, self.end


@dataclass(frozen=True)
class HostPlace:
    """Where the host was from `begin` to `end`: in which unit, phase and part, such as `all_gather`."""

    begin: float
    end: float
    unit: str | None
    phase: str
    part: str = ""


@dataclass(frozen=True)
class Allocation:
    """Memory of the device. `end` is None if it outlives the trace."""

    begin: float
    end: float | None
    nbytes: int


@dataclass(frozen=True)
class RankTrace:
    """A rank's profile. `issuing`: when the host was issuing work. `top`: seconds and calls by kernel, without what it calls.
    `about`: what the engine wrote beside the trace."""

    rank: int
    world: int
    engine: str
    device: str
    steps: tuple[StepWindow, ...]
    spans: tuple[WorkSpan, ...]
    issuing: tuple[Interval, ...]
    top: dict[str, tuple[float, int]]
    phases: tuple[HostPlace, ...] = ()
    places: tuple[HostPlace, ...] = ()  # of units, inner ones after outer ones
    allocations: tuple[Allocation, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)


def totals_by_name(calls: Iterable[tuple[str, float]]) -> dict[str, tuple[float, int]]:
    """Seconds and calls by name, from (name, seconds) of each call."""
    totals: dict[str, tuple[float, int]] = {}
    for name, seconds in calls:
        before, count = totals.get(name, (0.0, 0))
        totals[name] = (before + seconds, count + 1)
    return totals
