"""Homes for a plan that does not fit on its devices: as little as possible leaves, the cheapest to miss first.

Optimizer state goes to the host unit by unit, the last units first, since forward needs them last; then parameters,
then the blocks' activations. State that the host has no room for goes on to disk, then parameters, last the activations of
the first blocks, which backward needs last.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from fullshard.model.description import Description
from fullshard.plan import Home, Plan, Unit
from fullshard.planner.estimate import disk_available, host_available
from fullshard.planner.memory.peak import Level
from fullshard.planner.search.full_model import Tried, Whole
from fullshard.planner.search.reduced_model import Thin
from fullshard.planner.step.saved_activations import UNITS_IN_TRANSIT
from fullshard.planner.time.timeline import Timeline

STAIRS = (Home(), Home(optimizer="host"), Home("host", "host"), Home("host", "host", "host"))
CLIMBS, HALVES = 5, 3  # whole estimates of one candidate, on its way up and back
NO_QUICKER = 0.999
MOVES = 3  # to disk: what passes from there takes room on the host as well


@dataclass(frozen=True)
class Ladder:
    """A plan with more and more away from the device. A height is a number of stairs; a part of one is taken by the last
    units, as many as hold that part of the parameters. `all_cores`: the host's cores do all updates, so that with clipping no
    gradient waits on the device; `backlog`: without clipping, so many pieces' do, unless the plan says it itself; `staging`
    and `cpu_share`: in place of the plan's."""

    plan: Plan
    description: Description
    stairs: tuple[Home, ...]
    all_cores: bool = False
    backlog: int | None = None
    staging: int | None = None
    cpu_share: float | None = None
    whole: dict[int, Plan] = field(default_factory=dict, compare=False, repr=False)  # plans at whole stairs, made once

    @classmethod
    def of(
        cls,
        plan: Plan,
        description: Description,
        fixed: dict[str, Any],
        *,
        all_cores: bool = False,
        backlog: int | None = None,
    ) -> "Ladder":
        """`fixed`: homes that stay as they are. Parameters do not go to disk before their state leaves the device."""
        stairs = [replace(home, **fixed) for home in STAIRS]
        stairs = [home for home in stairs if (home.params, home.optimizer) != ("disk", "device")]
        return cls(plan, description, tuple(dict.fromkeys(stairs)), all_cores, backlog)

    @property
    def top(self) -> int:
        return len(self.stairs) - 1

    def at(self, height: float) -> Plan:
        """The plan at a height from 0 to the top."""
        if height not in self.whole and height == int(height):
            self.whole[int(height)] = self._made(height)
        return self.whole[int(height)] if height == int(height) else self._made(height)

    def _made(self, height: float) -> Plan:
        stair = min(int(height), self.top)
        last = self._last(height - stair) if stair < self.top else set()
        blocks = {u.name for u in self.description.units if u.kind == "block"}

        def home(unit: Unit) -> Home:
            found = self.stairs[stair + (unit.name in last)]
            return found if unit.name in blocks else replace(found, activations=self.stairs[0].activations)

        units = tuple(replace(u, home=home(u)) for u in self.plan.units)
        if units == self.plan.units and not self.plan.stages:
            return self.plan  # which is known already
        made = replace(self.plan, units=units, cpu_share=None, backlog=None)
        if not made.stages:
            return made
        share = 1.0 if self.all_cores else self.plan.cpu_share if self.cpu_share is None else self.cpu_share
        backlog, staging = self.plan.backlog or self.backlog, self.staging or self.plan.staging
        return replace(made, cpu_share=share, backlog=backlog, staging=staging)

    def _last(self, part: float) -> set[str]:
        """The last units that hold at least `part` of all parameters."""
        wanted, found = part * self.description.numel, set()
        for unit in reversed(self.description.units):
            if wanted <= 0:
                break
            found.add(unit.name)
            wanted -= unit.numel
        return found


@dataclass(frozen=True)
class Step:
    """A place on a ladder, and what thinned models say of it."""

    height: float
    needed: int
    time: Timeline


def lowest(ladder: Ladder, thin: Thin, room: int, onward: tuple[str, ...], *, slack: bool = False) -> Step | None:
    """The lowest height at which thinned models fit: in proportion between stairs, since they know no last units.
    `onward`: what may go on to disk; `slack`: whether with what the allocator is likely to add.

    What the host has no room for is timed as if it went to disk and back beside nothing else.
    """
    if thin.needed(ladder.at(ladder.top)) > room:
        return None
    for stair in range(1, ladder.top + 1):
        needed = thin.needed(ladder.at(stair))
        left = room - (thin.slack(ladder.at(stair)) if slack and needed <= room else 0)
        if needed <= left:
            below = thin.needed(ladder.at(stair - 1))
            part = (below - left) / (below - needed) if below > left else 0.0
            low, high = (ladder.at(s) for s in (stair - 1, stair))
            there = host_available(thin.cluster, needed)
            lacking = _between(thin.host(low), thin.host(high), part) - there
            if lacking > 0 and _between(thin.stuck(low, onward), thin.stuck(high, onward), part) > there:
                return None
            if lacking > disk_available(thin.cluster):
                return None
            away = max(0.0, lacking) * 2 / thin.cluster.of("disk_both")
            return Step(stair - 1 + part, min(room, below), _time(thin.timeline(low), thin.timeline(high), part, away))
    return None


def _between(low: float, high: float, part: float) -> float:
    return (1 - part) * low + part * high


def _time(low: Timeline, high: Timeline, part: float, on_disk: float) -> Timeline:
    causes = {*low.exposed, *high.exposed, "update"}
    exposed = {k: _between(low.exposed.get(k, 0.0), high.exposed.get(k, 0.0), part) for k in causes}
    exposed["update"] += on_disk
    return Timeline(_between(low.seconds, high.seconds, part) + on_disk, exposed=exposed)


def settle(
    ladder: Ladder, thin: Thin, start: float, whole: Whole, onward: tuple[str, ...], beaten: float = float("inf")
) -> Tried:
    """The lowest plan from a height upwards that fits when it is judged whole, or the highest that was tried.

    Each step up is as high as the one before was too large; then the way back is halved a few times. `beaten`: seconds of
    a step that another takes; what would be slower is not judged. `onward`: what may go on to disk.
    """
    height, tried = start, _judged(ladder, thin, start, whole, onward)
    failed: tuple[float, int] | None = None
    for _ in range(CLIMBS):
        if tried.found or not tried.host or height >= ladder.top:  # what is higher has more on the host
            break
        failed, step = (height, tried.needed), _lacking(ladder, thin, height, tried.needed - whole.room)
        if _seconds(ladder, thin, height + step) >= beaten:
            break
        height = min(float(ladder.top), height + 1.1 * step)
        tried = _judged(ladder, thin, height, whole, onward)
    return _lowered(ladder, thin, failed, (height, tried), whole, onward) if failed and tried.found else tried


def _lowered(
    ladder: Ladder, thin: Thin, failed: tuple[float, int], fits: tuple[float, Tried], whole: Whole, onward: tuple[str, ...]
) -> Tried:
    """The way back from a height that fits to one that did not, halved. Memory is even with height: what is too much by the
    line through both is not judged, nor is anything where a step is no quicker for it."""
    (low, most), (height, tried) = failed, fits
    on_disk = any("disk" in (u.home.params, u.home.optimizer, u.home.activations) for u in tried.plan.units)
    idle = not on_disk and _seconds(ladder, thin, low) > NO_QUICKER * _seconds(ladder, thin, height)
    for _ in range(0 if idle else HALVES):
        middle = (low + height) / 2
        likely = _between(most, tried.needed, (middle - failed[0]) / (height - failed[0]))
        lower = None
        if ladder.at(middle) == ladder.at(height):  # units are not cut
            lower = tried
        elif likely <= whole.room:
            lower = _judged(ladder, thin, middle, whole, onward)
        if lower and lower.found:
            height, tried = middle, lower
        else:
            low = middle
    return tried


def _judged(ladder: Ladder, thin: Thin, height: float, whole: Whole, onward: tuple[str, ...]) -> Tried:
    """The plan at a height; with what the host has no room for on disk, as far as it may go there."""
    plan = ladder.at(height)
    level = whole.level(plan)
    for _ in range(MOVES if onward else 0):
        if whole.lacking(level) > 0:
            plan = onto_disk(plan, ladder.description, level, whole.lacking(level), onward)
            level = whole.moved(plan, level)
    return whole.tried(plan, level, thin.slack(ladder.at(min(int(height) + 1, ladder.top))))


def _lacking(ladder: Ladder, thin: Thin, height: float, too_much: int) -> float:
    """By how much a plan is too low, if the next stair saves on the whole what it saves on thinned models."""
    stair = min(int(height) + 1, ladder.top)
    saved = max(thin.needed(ladder.at(stair - 1)) - thin.needed(ladder.at(stair)), 1)
    return max(too_much / saved, 0.02)


def _seconds(ladder: Ladder, thin: Thin, height: float) -> float:
    """Of a step at a height, at least: state on disk is left out."""
    stair = min(int(height), ladder.top - 1)
    low, high = (thin.timeline(ladder.at(s)).seconds for s in (stair, stair + 1))
    return _between(low, high, min(height - stair, 1.0))


def onto_disk(plan: Plan, description: Description, level: Level, lacking: int, kinds: tuple[str, ...]) -> Plan:
    """The plan with as many of the last units' state on disk as the host lacks room for; if all of it is not enough, the next
    kind too."""
    lacking += level.staging  # the slots that state passes on its way to disk
    for kind in kinds:
        if lacking > 0 and kind == "activations":
            plan, lacking = _spilled(plan, level.host.get(kind, 0), lacking)
        elif lacking > 0:
            plan, lacking = _moved(plan, description, level.host.get(kind, 0), kind, lacking)
    return plan


def _spilled(plan: Plan, held: int, lacking: int) -> tuple[Plan, int]:
    """The plan with the first units' activations, of which the host holds so much, on disk rather than there, and how many
    bytes are lacking still."""
    there = [u.name for u in plan.units if u.home.activations == "host"]
    each = held // max(len(there), 1)
    count = min(len(there), -(-lacking // each) + UNITS_IN_TRANSIT) if each else 0  # some pass the host on their way
    units = (replace(u, home=replace(u.home, activations="disk")) if u.name in there[:count] else u for u in plan.units)
    return replace(plan, units=tuple(units)), lacking - each * max(count - UNITS_IN_TRANSIT, 0)


def _moved(plan: Plan, description: Description, held: int, kind: str, lacking: int) -> tuple[Plan, int]:
    """The plan with the last units' `kind`, of which the host holds so much, on disk rather than there, and how many bytes are
    lacking still."""
    sizes = {u.name: u.numel for u in description.units}
    away = [u for u in plan.units if getattr(u.home, kind) == "host" and u.home.optimizer != "device"]
    share = held / max(sum(sizes[u.name] for u in away), 1)  # bytes a parameter
    moved: set[str] = set()
    for unit in reversed(away):
        if lacking <= 0:
            break
        moved.add(unit.name)
        lacking -= int(share * sizes[unit.name])
    on_disk: dict[str, Any] = {kind: "disk"}
    units = (replace(u, home=replace(u.home, **on_disk)) if u.name in moved else u for u in plan.units)
    return replace(plan, units=tuple(units)), lacking
