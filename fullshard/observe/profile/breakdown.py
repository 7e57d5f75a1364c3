"""Where the time of a step went on one rank, from unions of intervals.

Each moment of a step belongs to exactly one lane, the first of these that has it: compute, exposed communication, exposed
transfers, waiting for data, launch gaps, idle. So the lanes of a step add up to its wall time.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fullshard.observe.profile.intervals import Intervals, intersect, length, partition, subtract, union
from fullshard.observe.profile.rank_trace import COLLECTIVES, TRANSFERS, HostPlace, RankTrace, StepWindow, WorkSpan

LANES = ("compute", "communication", "transfers", "data", "launch", "idle")
HOLES = 0.5e-3  # seconds between two operations that the host still counts as issuing: Python runs between them
PHASES = ("forward", "backward", "update")


@dataclass(frozen=True)
class RankBreakdown:
    """A rank's mean step. `lanes`: seconds, which add up to `step_seconds`. `busy`: seconds by kind of work, overlapped or not.
    `units`: seconds by unit and cause."""

    rank: int
    step_seconds: float
    lanes: dict[str, float]
    busy: dict[str, float]
    units: dict[str, dict[str, float]]

    @property
    def own_seconds(self) -> float:
        """What the rank needs by itself: all but waiting in collectives, where the others' delay shows."""
        return self.step_seconds - self.lanes["communication"]

    @property
    def overlap(self) -> float | None:
        """The share of communication that runs beside compute; None without communication."""
        total = self.busy.get("communication", 0.0)
        return 1 - self.lanes["communication"] / total if total > 0 else None


def break_down(trace: RankTrace) -> RankBreakdown:
    """The mean over the profiled steps."""
    steps = [_step(trace, window) for window in trace.steps]
    return RankBreakdown(
        trace.rank,
        statistics.fmean(length([w.interval]) for w in trace.steps),
        mean_of([s.lanes for s in steps]),
        mean_of([s.busy for s in steps]),
        {unit: mean_of([s.units.get(unit, {}) for s in steps]) for unit in dict.fromkeys(u for s in steps for u in s.units)},
    )


def mean_of(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each key. A table without it counts as 0."""
    keys = dict.fromkeys(k for t in tables for k in t)
    return {k: statistics.fmean(t.get(k, 0.0) for t in tables) for k in keys}


def _step(trace: RankTrace, window: StepWindow) -> RankBreakdown:
    spans = [s for s in trace.spans if s.begin < window.end and s.end > window.begin]
    compute, talks, copies = (
        union(s.interval for s in spans if s.kind in kinds) for kinds in (("compute",), COLLECTIVES, TRANSFERS)
    )
    lanes = partition(
        window.interval,
        {
            "compute": compute,
            "communication": talks,
            "transfers": copies,
            "data": union(window.data),
            "launch": union(trace.issuing, HOLES),
        },
        "idle",
    )
    kinds: list[str] = list(dict.fromkeys(s.kind for s in spans))
    busy = {kind: _length_in(window, (s for s in spans if s.kind == kind)) for kind in kinds}
    busy["communication"] = length(intersect([window.interval], talks))
    seconds = {lane: length(parts) for lane, parts in lanes.items()}
    return RankBreakdown(trace.rank, window.end - window.begin, seconds, busy, _units(trace, window, spans, lanes))


def _length_in(window: StepWindow, spans: Iterable[WorkSpan]) -> float:
    return length(intersect([window.interval], union(s.interval for s in spans)))


def _units(
    trace: RankTrace, window: StepWindow, spans: list[WorkSpan], lanes: dict[str, Intervals]
) -> dict[str, dict[str, float]]:
    """Seconds of each unit: its compute by phase, its collectives and copies with their exposed parts, and idle time in it."""
    units: dict[str, dict[str, float]] = {}
    for unit in dict.fromkeys(s.unit for s in spans if s.unit is not None):
        of_unit = [s for s in spans if s.unit == unit]
        row = units[unit] = {}
        for phase in PHASES:
            row[phase] = _length_in(window, (s for s in of_unit if s.kind == "compute" and s.phase == phase))
        for cause, kinds in (("gather", ("gather",)), ("reduce", ("reduce", "all_reduce")), ("transfers", TRANSFERS)):
            parts = intersect([window.interval], union(s.interval for s in of_unit if s.kind in kinds))
            row[cause] = length(parts)
            exposed = lanes["transfers" if kinds is TRANSFERS else "communication"]
            row[f"{cause}_exposed"] = length(intersect(exposed, parts))
    for unit, idle in idle_by_unit(trace.places, lanes["idle"]).items():
        units.setdefault(unit, {})["idle"] = idle
    return units


def idle_by_unit(places: Iterable[HostPlace], idle: Intervals) -> dict[str, float]:
    """Idle seconds by the unit that the host was in, the innermost one."""
    seconds: dict[str, float] = {}
    left = idle
    for place in sorted(places, key=lambda p: -p.begin):  # an inner place begins after the outer one
        inside = intersect(left, [(place.begin, place.end)])
        if inside and place.unit:
            seconds[place.unit] = seconds.get(place.unit, 0.0) + length(inside)
            left = subtract(left, [(place.begin, place.end)])
    return seconds
