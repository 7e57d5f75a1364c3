"""Homes for a plan that does not fit on its devices: as little as possible leaves, what costs least time first.

Optimizer state goes to the host unit by unit, the last units first, since forward needs them last; then parameters, then
the blocks' activations. Where the host is short of room, parameters go together with their state, in whose memory they lie:
so fewer units leave. State that the host has no room for goes on to disk, then parameters, then the activations of the first
blocks, which backward needs last.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from fullshard.model.description import Description
from fullshard.plan.plan import Home, Plan, Unit
from fullshard.planner.estimate import disk_available, host_available
from fullshard.planner.memory.peak_memory import PeakBytes
from fullshard.planner.search.exact_estimates import FullModel
from fullshard.planner.step.saved_activations import UNITS_IN_TRANSIT

STATE_AWAY, TOGETHER = Home(optimizer="host"), Home("host", "host")
EVERYTHING = Home("host", "host", "host")
ORDERS = {  # in which parts leave the device
    "state": (Home(), STATE_AWAY, TOGETHER, EVERYTHING),
    "together": (Home(), TOGETHER, EVERYTHING),  # parameters with their state
    "activations": (Home(), Home(activations="host"), replace(STATE_AWAY, activations="host"), EVERYTHING),
    "parameters last": (Home(), STATE_AWAY, replace(STATE_AWAY, activations="host"), EVERYTHING),
}
STEPS = 256  # between two whole levels
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
    # By whole level and units moved on: what is known of plans is remembered by identity.
    made: dict[tuple[int, int], Plan] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        plan: Plan,
        description: Description,
        fixed: dict[str, Any],
        *,
        all_cores: bool = False,
        backlog: int | None = None,
        order: str = "state",
    ) -> "OffloadLevels":
        """The levels of a plan. `fixed`: homes that stay as they are. `order`: in which parts leave.

        Parameters do not go to disk before their state leaves the device.
        """
        levels = [replace(home, **fixed) for home in ORDERS[order]]
        levels = [home for home in levels if (home.params, home.optimizer) != ("disk", "device")]
        return cls(plan, description, tuple(dict.fromkeys(levels)), all_cores, backlog)

    @property
    def top(self) -> int:
        return len(self.levels) - 1

    def at(self, level: float) -> Plan:
        """The plan at a level."""
        below = min(int(level), self.top)
        last = self._last_units(level - below) if below < self.top else set()
        key = (below, len(last))
        if key not in self.made:
            self.made[key] = self._make(below, last)
        return self.made[key]

    def _make(self, below: int, last: set[str]) -> Plan:
        blocks = {u.name for u in self.description.units if u.kind == "block"}

        # A chosen kernel of updates needs state on the device: the first unit's, which would leave last.
        kept = self.plan.units[0].name if self.plan.kernels.update != "auto" else None

        def home(unit: Unit) -> Home:
            found = self.levels[0 if unit.name == kept else below + (unit.name in last)]
            return found if unit.name in blocks else replace(found, activations=self.levels[0].activations)

        units = tuple(replace(u, home=home(u)) for u in self.plan.units)
        if units == self.plan.units and not self.plan.offloads_state:
            return self.plan
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
    """A level, and about how many seconds a step takes there."""

    level: float
    seconds: float


def lowest_level(offload: OffloadLevels, full: FullModel, to_disk: tuple[str, ...]) -> LevelEstimate | None:
    """About the lowest level that fits, or None. Between whole levels, bytes and seconds are interpolated.

    `to_disk`: what may go on from host to disk; bytes that go there are timed as one read and one write without overlap.
    """
    if full.peak(offload.at(offload.top)).device > full.room:
        return None
    for level in range(1, offload.top + 1):
        low, high = (full.peak(offload.at(at)) for at in (level - 1, level))
        if high.device <= full.room:
            part = (low.device - full.room) / (low.device - high.device) if low.device > full.room else 0.0
            host_room = host_available(full.request.cluster, high.device)
            shortage = _between(sum(low.host.values()), sum(high.host.values()), part) - host_room
            if shortage > 0 and _between(_stuck(low, to_disk), _stuck(high, to_disk), part) > host_room:
                return None
            if shortage > disk_available(full.request.cluster):
                return None
            disk_seconds = max(0.0, shortage) * 2 / full.request.cluster.of("disk_both")
            seconds = _between(full.seconds(offload.at(level - 1)), full.seconds(offload.at(level)), part)
            return LevelEstimate(level - 1 + part, seconds + disk_seconds)
    return None


def _stuck(peak: PeakBytes, to_disk: tuple[str, ...]) -> int:
    """Bytes of host memory that cannot go on to disk."""
    return sum(nbytes for term, nbytes in peak.host.items() if term not in to_disk)


def _between(low: float, high: float, part: float) -> float:
    return (1 - part) * low + part * high


def place_level(
    offload: OffloadLevels, start: float, full: FullModel, to_disk: tuple[str, ...], room: int
) -> tuple[float, Plan] | None:
    """The lowest level whose allocated bytes fit, and its plan; the search begins about `start`, and ends between two units."""
    steps = STEPS * offload.top
    fits: dict[int, Plan] = {}

    def fit(step: int) -> bool:
        plan = _on_host(offload, step / STEPS, full, to_disk)
        peak = full.peak(plan)
        if peak.device <= room and full.host_shortage(peak) <= 0:
            fits[step] = plan
        return step in fits

    low, high, width = -1, min(steps, math.ceil(start * STEPS)), 1
    while not fit(high):  # upwards in growing steps
        if high == steps:
            return None
        low, high, width = high, min(steps, high + width), 4 * width
    low = low if low >= 0 else max(-1, high - 2 * width)
    while low > 0 and fit(low):  # downwards in growing steps
        high, low, width = low, max(0, low - width), 4 * width
    while high - low > 1 and offload.at(low / STEPS) is not offload.at(high / STEPS):
        middle = (low + high) // 2
        low, high = (low, middle) if fit(middle) else (middle, high)
    return high / STEPS, fits[high]


def _on_host(offload: OffloadLevels, level: float, full: FullModel, to_disk: tuple[str, ...]) -> Plan:
    """The plan at a level, with what the host has no room for on disk."""
    plan = offload.at(level)
    peak = full.peak(plan)
    for _ in range(DISK_MOVES if to_disk else 0):
        if full.host_shortage(peak) > 0:
            plan = move_to_disk(plan, offload.description, peak, full.host_shortage(peak), to_disk)
            peak = full.peak(plan)
    return plan


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
