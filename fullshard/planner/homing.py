"""Homes for a plan that does not fit on its devices: as little as possible leaves, the cheapest to miss first.

Optimizer state goes to the host unit by unit, the last units first, since forward needs them last; then parameters,
then the blocks' activations. State that the host has no room for goes on to disk, and parameters after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fullshard.description import Description
from fullshard.plan import Home, Plan, Unit
from fullshard.planner.estimate import Estimate, host_available
from fullshard.planner.thin import Thin
from fullshard.planner.timeline import Timeline

STAIRS = (Home(), Home(optimizer="host"), Home("host", "host"), Home("host", "host", "host"))
CLIMBS, HALVES = 5, 3  # whole estimates of one candidate, on its way up and back
Estimated = tuple[Plan, Estimate]


@dataclass(frozen=True)
class Ladder:
    """A plan with more and more away from the device. A height is a number of stairs; a part of one is taken by the last
    units, as many as hold that part of the parameters. `all_cores`: the host's cores do all updates, so that with clipping no
    gradient waits on the device; `backlog`: without clipping, so many pieces' do, unless the plan says it itself."""

    plan: Plan
    description: Description
    stairs: tuple[Home, ...]
    all_cores: bool = False
    backlog: int | None = None

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
        stair = min(int(height), self.top)
        last = self._last(height - stair) if stair < self.top else set()
        blocks = {u.name for u in self.description.units if u.kind == "block"}

        def home(unit: Unit) -> Home:
            found = self.stairs[stair + (unit.name in last)]
            return found if unit.name in blocks else replace(found, activations=self.stairs[0].activations)

        units = tuple(replace(u, home=home(u)) for u in self.plan.units)
        made = replace(self.plan, units=units, cpu_share=None, backlog=None)
        if not made.stages:
            return made
        share = 1.0 if self.all_cores else self.plan.cpu_share
        return replace(made, cpu_share=share, backlog=self.plan.backlog or self.backlog)

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


def lowest(ladder: Ladder, thin: Thin, room: int, disk: bool) -> Step | None:
    """The lowest height at which thinned models fit: in proportion between stairs, since they know no last units.

    What the host has no room for is timed as if it went to disk and back beside nothing.
    """
    below = thin.needed(ladder.at(0))
    for stair in range(1, ladder.top + 1):
        needed = thin.needed(ladder.at(stair))
        if needed <= room:
            part = (below - room) / (below - needed) if below > room else 0.0
            low, high = (ladder.at(s) for s in (stair - 1, stair))
            lacking = _between(thin.host(low), thin.host(high), part) - host_available(thin.cluster, needed)
            if lacking > 0 and not disk:
                return None
            away = max(0.0, lacking) * (1 / thin.cluster.of("disk_read") + 1 / thin.cluster.of("disk_write"))
            return Step(stair - 1 + part, min(room, below), _time(thin.timeline(low), thin.timeline(high), part, away))
        below = needed
    return None


def _between(low: float, high: float, part: float) -> float:
    return (1 - part) * low + part * high


def _time(low: Timeline, high: Timeline, part: float, on_disk: float) -> Timeline:
    causes = {*low.exposed, *high.exposed, "update"}
    exposed = {k: _between(low.exposed.get(k, 0.0), high.exposed.get(k, 0.0), part) for k in causes}
    exposed["update"] += on_disk
    return Timeline(_between(low.seconds, high.seconds, part) + on_disk, exposed=exposed)


def settle(ladder: Ladder, thin: Thin, start: float, judge: Callable[[Plan], Estimate], disk: bool) -> Estimated:
    """The lowest plan from a height upwards that fits when it is judged whole, or the highest that was tried.

    Each step up is as high as the one before was too large; then the way back is halved a few times.
    """
    low, high, tried = start, float(ladder.top), _judged(ladder, start, judge, disk)
    for _ in range(CLIMBS):
        if tried[1].fits or low >= high:
            break
        low, before = min(high, low + _lacking(ladder, thin, low, tried[1])), low
        tried = _judged(ladder, low, judge, disk)
        start = before
    if not tried[1].fits:
        return tried
    fitting = low
    for _ in range(HALVES if fitting > start else 0):
        middle = (start + fitting) / 2
        lower = _judged(ladder, middle, judge, disk)
        if lower[1].fits:
            tried, fitting = lower, middle
        else:
            start = middle
    return tried


def _judged(ladder: Ladder, height: float, judge: Callable[[Plan], Estimate], disk: bool) -> Estimated:
    """The plan at a height; with state on disk if the host has no room for it."""
    plan = ladder.at(height)
    found = judge(plan)
    if found.host.allocated_bytes > found.host_available and disk:
        plan = onto_disk(plan, ladder.description, found)
        found = judge(plan)
    return plan, found


def _lacking(ladder: Ladder, thin: Thin, height: float, found: Estimate) -> float:
    """By how much a plan is too low, if the next stair saves on the whole what it saves on thinned models."""
    stair = min(int(height) + 1, ladder.top)
    saved = max(thin.needed(ladder.at(stair - 1)) - thin.needed(ladder.at(stair)), 1)
    return max(1.1 * (found.needed - found.available) / saved, 0.02)


def onto_disk(plan: Plan, description: Description, found: Estimate) -> Plan:
    """The plan with as many of the last units' state on disk as the host lacks room for; if all of it is not enough, their
    parameters too."""
    lacking = found.host.allocated_bytes - found.host_available
    lacking += found.device.terms.get("staging", 0)  # the slots that state passes on its way to disk
    for kind in ("optimizer", "params"):
        if lacking > 0:
            plan, lacking = _moved(plan, description, found, kind, lacking)
    return plan


def _moved(plan: Plan, description: Description, found: Estimate, kind: str, lacking: int) -> tuple[Plan, int]:
    """The plan with the last units' `kind` on disk rather than on the host, and how many bytes are lacking still."""
    sizes = {u.name: u.numel for u in description.units}
    away = [u for u in plan.units if getattr(u.home, kind) == "host" and u.home.optimizer != "device"]
    share = found.host.terms.get(kind, 0) / max(sum(sizes[u.name] for u in away), 1)  # bytes a parameter
    moved: set[str] = set()
    for unit in reversed(away):
        if lacking <= 0:
            break
        moved.add(unit.name)
        lacking -= int(share * sizes[unit.name])
    on_disk: dict[str, Any] = {kind: "disk"}
    units = (replace(u, home=replace(u.home, **on_disk)) if u.name in moved else u for u in plan.units)
    return replace(plan, units=tuple(units)), lacking


# -- in words ------------------------------------------------------------------------------------------------


def home_words(plan: Plan) -> str:
    """What rests away, in a few words: `optimizer of the last 12 units on host`; who updates it, and how many gradients wait
    for that, where the plan says it."""
    found: dict[tuple[str, str], list[str]] = {}  # kinds by which units and which place
    for place in ("host", "disk"):
        for kind in ("optimizer", "params", "activations"):
            there = [u for u in plan.units if getattr(u.home, kind) == place]
            if there:
                found.setdefault((_which(plan, there, kind), place), []).append(kind)
    words = [f"{_listed(kinds)}{which} on {place}" for (which, place), kinds in found.items()]
    words += [] if plan.cpu_share is None else [f"{plan.cpu_share:.0%} of the updates by the cores"]
    return ", ".join(words if plan.backlog is None else [*words, f"a backlog of {plan.backlog} pieces"])


def _which(plan: Plan, there: list[Unit], kind: str) -> str:
    if len(there) == len(plan.units) or kind == "activations":
        return ""
    last = list(plan.units[len(plan.units) - len(there) :]) == there
    return f" of {'the last ' if last else ''}{len(there)} unit{'s' if len(there) > 1 else ''}"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
