"""Where each byte of a rank's device is at the peak of the profiled steps, by unit and kind, and how much after each phase."""

from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.observe.profile.breakdown import PHASES
from fullshard.observe.profile.host_places import places_at
from fullshard.observe.profile.rank_trace import Allocation, HostPlace, RankTrace

OUTSIDE = "(outside units)"
GATHERS = ("all_gather", "all_gather_copy_out", "pre_forward", "pre_backward")


@dataclass(frozen=True)
class MemoryPeak:
    """Bytes at the peak, by unit and kind; and (phase, before, after) of the last step."""

    nbytes: int
    units: dict[str, dict[str, int]]
    phases: list[tuple[str, int, int]]

    @property
    def kinds(self) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for row in self.units.values():
            for kind, nbytes in row.items():
                kinds[kind] = kinds.get(kind, 0) + nbytes
        return kinds


def memory_peak(trace: RankTrace) -> MemoryPeak:
    """The peak of what was held at the start of the trace and of what was allocated since."""
    held: dict[str, dict[str, int]] = {unit: dict(kinds) for unit, kinds in trace.about.get("held", {}).items()}
    rest = sum(n for kinds in held.values() for n in kinds.values())
    at = _highest(trace)
    alive = [a for a in trace.allocations if a.begin <= at and (a.end is None or a.end > at)]
    for allocation, unit, kind in _kinds(trace, alive):
        row = held.setdefault(unit or OUTSIDE, {})
        row[kind] = row.get(kind, 0) + allocation.nbytes
    return MemoryPeak(rest + sum(a.nbytes for a in alive), held, _phases(trace, rest))


def _highest(trace: RankTrace) -> float:
    """When most is allocated, of all moments inside a step."""
    changes = [(a.begin, a.nbytes) for a in trace.allocations]
    changes += [(a.end, -a.nbytes) for a in trace.allocations if a.end is not None]
    now, most, when = 0, -1, trace.steps[0].begin
    for at, nbytes in sorted(changes):
        now += nbytes
        if now > most and any(w.begin <= at <= w.end for w in trace.steps):
            most, when = now, at
    return when


def _kinds(trace: RankTrace, alive: list[Allocation]) -> Iterable[tuple[Allocation, str | None, str]]:
    """The unit and kind of each allocation, by where the host was when it was made and when it was freed."""
    made, freed = [a.begin for a in alive], [float("inf") if a.end is None else a.end for a in alive]
    phases, ends = places_at(trace.phases, made), places_at(trace.places, freed)
    ended = places_at(trace.phases, freed)
    for a, place, phase, end, late in zip(alive, places_at(trace.places, made), phases, ends, ended, strict=True):
        kept = late is None or late.phase == "update"
        yield a, place.unit if place else None, _kind(place, phase.phase if phase else "", end, kept)


def _kind(place: HostPlace | None, phase: str, freed: HostPlace | None, kept: bool) -> str:
    """`kept`: whether it is freed by the update or later."""
    part = place.part if place else ""
    if part in GATHERS:
        return "gathered"
    if part.startswith("post_backward"):
        return "reduce" if freed and freed.part.startswith(("post_backward", "pre_backward")) else "gradients"
    if phase == "update":
        return "workspace"
    if not phase:
        return "batch"
    if freed and freed.part.startswith("post_backward"):
        return "whole gradients"
    if phase == "backward" and kept:  # as it was computed
        return "gradients"
    return "activations" if place else "loss"


def _phases(trace: RankTrace, rest: int) -> list[tuple[str, int, int]]:
    last = trace.steps[-1]

    def held_at(time: float) -> int:
        return rest + sum(a.nbytes for a in trace.allocations if a.begin <= time and (a.end is None or a.end > time))

    rows = []
    for phase in PHASES:
        parts = [p for p in trace.phases if p.phase == phase and last.begin <= p.begin <= last.end]
        if parts:
            rows.append((phase, held_at(min(p.begin for p in parts)), held_at(max(p.end for p in parts))))
    return rows
