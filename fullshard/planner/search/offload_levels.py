"""Homes for a plan that does not fit on its devices: as little as possible leaves, what costs least time first.

Optimizer state goes to the host unit by unit, the last units first, since forward needs them last; then parameters, then
the blocks' activations. Where the host is short of room, parameters go together with their state, in whose memory they lie:
so fewer units leave. State that the host has no room for goes on to disk, then parameters, then the activations of the first
blocks, which backward needs last.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from fullshard.model.description import Description
from fullshard.plan.plan import Home, Plan, Unit
from fullshard.planner.estimate import disk_available, host_available
from fullshard.planner.memory.peak_memory import PeakBytes
from fullshard.planner.search.exact_estimates import FullModel, FullResult
from fullshard.planner.search.reduced_model import ReducedModel
from fullshard.planner.step.saved_activations import UNITS_IN_TRANSIT
from fullshard.planner.time.step_lanes import Timeline

STATE_AWAY, TOGETHER = Home(optimizer="host"), Home("host", "host")
LEVELS = (Home(), STATE_AWAY, TOGETHER, Home("host", "host", "host"))
RAISES, HALVINGS = 5, 3  # exact estimates of one candidate: while its level rises, and while it falls again
NO_FASTER = 0.999  # of a step's seconds: a lower level that saves less is not tried
DISK_MOVES = 3  # rounds: what moves to disk needs staging on the host, which may lack room in turn


@dataclass(frozen=True)
class OffloadLevels:
    """A plan with more and more away from the device.

    A level is a number from 0 to `top`. Level 1.5 has the homes of `levels[1]`, and those of `levels[2]` for the last units
    that hold half of the parameters. `all_cores`: the host's cores do all updates, so with clipping no gradient waits on
    the device. `backlog`, `staging` and `cpu_share`: in place of the plan's; a backlog that the plan sets itself stays.
    """

    plan: Plan
    description: Description
    levels: tuple[Home, ...]
    all_cores: bool = False
    backlog: int | None = None
    staging: int | None = None
    cpu_share: float | None = None
    made: dict[int, Plan] = field(default_factory=dict, compare=False, repr=False)  # plans at whole levels

    @classmethod
    def of(
        cls,
        plan: Plan,
        description: Description,
        fixed: dict[str, Any],
        *,
        all_cores: bool = False,
        backlog: int | None = None,
        together: bool = False,
    ) -> "OffloadLevels":
        """The levels of a plan. `fixed`: homes that stay as they are. `together`: parameters leave with their state.

        Parameters do not go to disk before their state leaves the device.
        """
        levels = [replace(home, **fixed) for home in LEVELS if not (together and home == STATE_AWAY)]
        levels = [home for home in levels if (home.params, home.optimizer) != ("disk", "device")]
        return cls(plan, description, tuple(dict.fromkeys(levels)), all_cores, backlog)

    @property
    def top(self) -> int:
        return len(self.levels) - 1

    def at(self, level: float) -> Plan:
        """The plan at a level."""
        if level not in self.made and level == int(level):
            self.made[int(level)] = self._make(level)
        return self.made[int(level)] if level == int(level) else self._make(level)

    def _make(self, level: float) -> Plan:
        below = min(int(level), self.top)
        last = self._last_units(level - below) if below < self.top else set()
        blocks = {u.name for u in self.description.units if u.kind == "block"}

        # A chosen kernel of updates needs state on the device: the first unit's, which would leave last.
        kept = self.plan.units[0].name if self.plan.kernels.update != "auto" else None

        def home(unit: Unit) -> Home:
            found = self.levels[0 if unit.name == kept else below + (unit.name in last)]
            return found if unit.name in blocks else replace(found, activations=self.levels[0].activations)

        units = tuple(replace(u, home=home(u)) for u in self.plan.units)
        if units == self.plan.units and not self.plan.offloads_state:
            return self.plan  # the same object: reduced models remember plans by identity
        made = replace(self.plan, units=units, cpu_share=None, backlog=None)
        if not made.offloads_state:
            return made
        share = 1.0 if self.all_cores else self.plan.cpu_share if self.cpu_share is None else self.cpu_share
        backlog, staging = self.plan.backlog or self.backlog, self.staging or self.plan.staging
        return replace(made, cpu_share=share, backlog=backlog, staging=staging)

    def _last_units(self, share: float) -> set[str]:
        """The last units that hold at least `share` of all parameters."""
        missing, found = share * self.description.numel, set()
        for unit in reversed(self.description.units):
            if missing <= 0:
                break
            found.add(unit.name)
            missing -= unit.numel
        return found


@dataclass(frozen=True)
class LevelEstimate:
    """A level with its bytes on the device and its timeline, by the reduced model."""

    level: float
    needed: int
    time: Timeline


def lowest_level(
    offload: OffloadLevels, reduced: ReducedModel, room: int, to_disk: tuple[str, ...], *, slack: bool = False
) -> LevelEstimate | None:
    """The lowest level that fits by the reduced model, or None. Between whole levels, bytes and seconds are interpolated.

    `to_disk`: what may go on from host to disk; bytes that go there are timed as one read and one write without overlap.
    `slack`: True to allow for what the allocator adds.
    """
    if reduced.needed(offload.at(offload.top)) > room:
        return None
    for level in range(1, offload.top + 1):
        needed = reduced.needed(offload.at(level))
        left = room - (reduced.slack(offload.at(level)) if slack and needed <= room else 0)
        if needed <= left:
            below = reduced.needed(offload.at(level - 1))
            part = (below - left) / (below - needed) if below > left else 0.0
            low, high = (offload.at(s) for s in (level - 1, level))
            host_room = host_available(reduced.cluster, needed)
            shortage = _between(reduced.host(low), reduced.host(high), part) - host_room
            stuck = _between(reduced.host_only(low, to_disk), reduced.host_only(high, to_disk), part)
            if shortage > 0 and stuck > host_room:
                return None
            if shortage > disk_available(reduced.cluster):
                return None
            disk_seconds = max(0.0, shortage) * 2 / reduced.cluster.of("disk_both")
            time = _interpolated(reduced.timeline(low), reduced.timeline(high), part, disk_seconds)
            return LevelEstimate(level - 1 + part, min(room, below), time)
    return None


def _between(low: float, high: float, part: float) -> float:
    return (1 - part) * low + part * high


def _interpolated(low: Timeline, high: Timeline, part: float, disk_seconds: float) -> Timeline:
    causes = {*low.exposed, *high.exposed, "update"}
    exposed = {k: _between(low.exposed.get(k, 0.0), high.exposed.get(k, 0.0), part) for k in causes}
    exposed["update"] += disk_seconds
    return Timeline(_between(low.seconds, high.seconds, part) + disk_seconds, exposed=exposed)


def fit_level(
    offload: OffloadLevels,
    reduced: ReducedModel,
    start: float,
    full: FullModel,
    to_disk: tuple[str, ...],
    faster_than: float = float("inf"),
) -> FullResult:
    """The lowest level from `start` upwards whose exact estimate fits; the last that was tried if none does.

    Each raise is in proportion to the bytes that were too many. Then the interval back is halved a few times.
    `faster_than`: seconds of a step; levels that are slower by the reduced model are not tried.
    """
    level, result = start, _judge(offload, reduced, start, full, to_disk)
    failed: tuple[float, int] | None = None
    for _ in range(RAISES):
        if result.estimate or not result.fits_host or level >= offload.top:  # a higher level needs more of the host
            break
        failed, step = (level, result.needed), _missing_levels(offload, reduced, level, result.needed - full.room)
        if _seconds(offload, reduced, level + step) >= faster_than:
            break
        level = min(float(offload.top), level + 1.1 * step)
        result = _judge(offload, reduced, level, full, to_disk)
    return _lowered(offload, reduced, failed, (level, result), full, to_disk) if failed and result.estimate else result


def _lowered(
    offload: OffloadLevels,
    reduced: ReducedModel,
    failed: tuple[float, int],
    fits: tuple[float, FullResult],
    full: FullModel,
    to_disk: tuple[str, ...],
) -> FullResult:
    """Halve the interval between a level that failed and one that fits.

    Memory is about linear in the level: levels that are too much by the line through both are not estimated. Nothing is
    tried if a lower level is no faster.
    """
    (low, most), (level, result) = failed, fits
    on_disk = uses_disk(result.plan)
    no_gain = not on_disk and _seconds(offload, reduced, low) > NO_FASTER * _seconds(offload, reduced, level)
    for _ in range(0 if no_gain else HALVINGS):
        middle = (low + level) / 2
        likely = _between(most, result.needed, (middle - failed[0]) / (level - failed[0]))
        lower = None
        if offload.at(middle) == offload.at(level):  # units move as a whole
            lower = result
        elif likely <= full.room:
            lower = _judge(offload, reduced, middle, full, to_disk)
        if lower and lower.estimate:
            level, result = middle, lower
        else:
            low = middle
    return result


def uses_disk(plan: Plan) -> bool:
    return any("disk" in (u.home.params, u.home.optimizer, u.home.activations) for u in plan.units)


def _judge(offload: OffloadLevels, reduced: ReducedModel, level: float, full: FullModel, to_disk: tuple[str, ...]) -> FullResult:
    """The exact result at a level, with what the host has no room for on disk."""
    plan = offload.at(level)
    peak = full.peak(plan)
    for _ in range(DISK_MOVES if to_disk else 0):
        if full.host_shortage(peak) > 0:
            plan = move_to_disk(plan, offload.description, peak, full.host_shortage(peak), to_disk)
            peak = full.peak_after_move(plan, peak)
    return full.judge(plan, peak, reduced.slack(offload.at(min(int(level) + 1, offload.top))))


def _missing_levels(offload: OffloadLevels, reduced: ReducedModel, level: float, too_much: int) -> float:
    """By how much a level is too low, if the next one saves the full model what it saves the reduced one."""
    above = min(int(level) + 1, offload.top)
    saved = max(reduced.needed(offload.at(above - 1)) - reduced.needed(offload.at(above)), 1)
    return max(too_much / saved, 0.02)


def _seconds(offload: OffloadLevels, reduced: ReducedModel, level: float) -> float:
    """A lower bound of step time at a level: what goes to disk is left out."""
    below = min(int(level), offload.top - 1)
    low, high = (reduced.timeline(offload.at(s)).seconds for s in (below, below + 1))
    return _between(low, high, min(level - below, 1.0))


def move_to_disk(plan: Plan, description: Description, peak: PeakBytes, shortage: int, kinds: tuple[str, ...]) -> Plan:
    """The plan with as much on disk as the host lacks room for: of the first kind, and of the next if that is not enough."""
    shortage += peak.staging  # state passes the host in slots on its way to disk
    for kind in kinds:
        if shortage > 0 and kind == "activations":
            plan, shortage = _activations_to_disk(plan, peak.host.get(kind, 0), shortage)
        elif shortage > 0:
            plan, shortage = _units_to_disk(plan, description, peak.host.get(kind, 0), kind, shortage)
    return plan


def _activations_to_disk(plan: Plan, held: int, shortage: int) -> tuple[Plan, int]:
    """The plan with activations of the first units on disk, and the bytes still missing. `held`: bytes on the host."""
    there = [u.name for u in plan.units if u.home.activations == "host"]
    each = held // max(len(there), 1)
    count = (
        min(len(there), -(-shortage // each) + UNITS_IN_TRANSIT) if each else 0
    )  # UNITS_IN_TRANSIT of them pass the host at any time
    units = (replace(u, home=replace(u.home, activations="disk")) if u.name in there[:count] else u for u in plan.units)
    return replace(plan, units=tuple(units)), shortage - each * max(count - UNITS_IN_TRANSIT, 0)


def _units_to_disk(plan: Plan, description: Description, held: int, kind: str, shortage: int) -> tuple[Plan, int]:
    """The plan with `kind` of the last units on disk, and the bytes still missing. `held`: bytes of the kind on the host."""
    sizes = {u.name: u.numel for u in description.units}
    on_host = [u for u in plan.units if getattr(u.home, kind) == "host" and u.home.optimizer != "device"]
    share = held / max(sum(sizes[u.name] for u in on_host), 1)  # bytes a parameter
    moved: set[str] = set()
    for unit in reversed(on_host):
        if shortage <= 0:
            break
        moved.add(unit.name)
        shortage -= int(share * sizes[unit.name])
    on_disk: dict[str, Any] = {kind: "disk"}
    units = (replace(u, home=replace(u.home, **on_disk)) if u.name in moved else u for u in plan.units)
    return replace(plan, units=tuple(units)), shortage
