"""The fastest plan that fits, by best-first search: what promises the fewest seconds is looked at next, a little closer.

Looks go from cheap to exact: the kernels of a batch, the exact seconds of a plan, its allocated bytes, and last what
the allocator adds. Each look puts what it found back in its place, so the first plan that is known to fit is the fastest.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fullshard.plan.plan import Plan
from fullshard.planner.search.exact_estimates import FullModel, FullResult
from fullshard.planner.search.offload_candidates import offloaded_candidates
from fullshard.planner.search.offload_levels import OffloadLevels, place_level
from fullshard.planner.search.plan_space import PlanRequest, StrategyFamilies
from fullshard.planner.search.staging_slots import add_staging_slots
from fullshard.planner.search.strategy_cells import Cell, with_least_remat

WORTH = 0.995  # of a step's seconds: a plan that fits on the device is left for one with parts elsewhere only for more than this
PROMISED = 0.98  # of seconds that are interpolated: exact ones can be fewer
SHORTER = ("gather", "reduce", "copies", "host", "crowding")  # waits that other homes can shorten
MOST_OFFLOADED = 6  # plans that are looked at with parts elsewhere, the fastest first: each takes as long as ten on the device
RAISES = 4  # plans that are estimated exactly of one that the allocator makes too large, each a little smaller

Cells = Iterable[tuple[StrategyFamilies, Cell]]


@dataclass(frozen=True)
class Found:
    """The fastest plan, and the strategy that it is of."""

    strategy: StrategyFamilies
    result: FullResult


class BestFirst(ABC):
    """A queue of looks, by the seconds that they promise. `limit`: what takes as many seconds is not looked at."""

    def __init__(self, request: PlanRequest, full: FullModel, limit: float = float("inf")):
        self.request, self.full, self.limit = request, full, limit
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.best: Found | None = None

    def run(self, among: Cells) -> Found | None:
        """The fastest plan of these cells that fits."""
        for strategy, cell in among:
            self.put(cell.bound(), self.begin, strategy, cell)
        while self.queue and self.queue[0][0] < self.limit:
            self.request.check()
            heapq.heappop(self.queue)[2]()
        return self.best

    def put(self, seconds: float, look: Callable[..., None], *about: object) -> None:
        if seconds < self.limit:
            self.count += 1
            heapq.heappush(self.queue, (seconds, self.count, lambda: look(*about)))

    def take(self, strategy: StrategyFamilies, result: FullResult) -> None:
        if result.seconds < self.limit:
            self.best, self.limit = Found(strategy, result), result.seconds

    @abstractmethod
    def begin(self, strategy: StrategyFamilies, cell: Cell) -> None:
        """Look at a cell for the first time."""


class OnDevice(BestFirst):
    """Plans with everything where the request has it, by default on the device."""

    def begin(self, strategy: StrategyFamilies, cell: Cell) -> None:
        self.put(self.full.seconds(cell.plans[0]), self._first, strategy, cell)

    def _first(self, strategy: StrategyFamilies, cell: Cell) -> None:
        """The fastest plan of a cell. Where it does not fit, those with remat may."""
        result = self.full.judge(cell.plans[0])
        if result.estimate:
            self.take(strategy, add_staging_slots(result, None, self.full))
        else:
            self._leaner(strategy, cell)

    def _leaner(self, strategy: StrategyFamilies, cell: Cell) -> None:
        """Plans with more remat, in as few blocks as fit by a line through what the two ends need and take."""
        first, full = cell.plans[0], self.full
        for plan in cell.plans[1:]:
            most, least = full.peak(first).device, full.peak(plan).device
            if least > full.room:
                continue
            share = 0.0 if "remat" in self.request.fix else (full.room - least) / max(most - least, full.room - least, 1)
            seconds = full.seconds(plan) - share * (full.seconds(plan) - full.seconds(first))
            self.put(PROMISED * seconds, self._remat, strategy, cell, plan, None)

    def _remat(self, strategy: StrategyFamilies, cell: Cell, plan: Plan, slack: int | None) -> None:
        """A plan with remat, in as few blocks as fit. `slack`: what the allocator adds, once that is known."""
        slack = self.full.slack(plan) if slack is None else slack
        least = plan if "remat" in self.request.fix else with_least_remat(self.full, plan, self.full.room - slack)
        if least is not None:
            self.put(self.full.seconds(least), self._judge, strategy, cell, least, plan, slack)

    def _judge(self, strategy: StrategyFamilies, cell: Cell, least: Plan, plan: Plan, slack: int) -> None:
        """A plan whose allocated bytes fit."""
        result = self.full.judge(least)
        if result.estimate:
            self.take(strategy, add_staging_slots(result, None, self.full))
        elif least is not plan:
            more = max(slack + self.full.room // 1000, result.needed - self.full.peak(least).device)
            self.put(self.full.seconds(least), self._remat, strategy, cell, plan, more)


class Offloaded(BestFirst):
    """Plans with as little away from the device as it takes to fit. They are taken to be no faster than with all of it there."""

    def begin(self, strategy: StrategyFamilies, cell: Cell) -> None:
        for plan in cell.plans:
            if self.full.seconds(plan) >= self.limit or self.full.judge(plan).estimate:
                break
            self.put(self.full.seconds(plan), self._offload, strategy, plan)

    looks = MOST_OFFLOADED

    def _offload(self, strategy: StrategyFamilies, plan: Plan) -> None:
        if self.looks <= 0:
            return
        found = list(offloaded_candidates(self.request, self.full, plan))
        self.looks -= bool(found)  # those that cannot fit cost little
        for seconds, level, offload in found:
            self.put(seconds, self._level, strategy, offload, level, None, RAISES)

    def _level(self, strategy: StrategyFamilies, offload: OffloadLevels, level: float, slack: int | None, tries: int) -> None:
        """The lowest level whose allocated bytes fit. `slack`: what the allocator adds, once that is known."""
        slack = self.full.slack(offload.plan) if slack is None else slack
        found = place_level(offload, level, self.full, self.request.to_disk, self.full.room - slack)
        if found is not None:
            at, plan = found
            self.put(self.full.seconds(plan), self._judge, strategy, offload, at, plan, slack, tries)

    def _judge(
        self, strategy: StrategyFamilies, offload: OffloadLevels, level: float, plan: Plan, slack: int, tries: int
    ) -> None:
        result = self.full.judge(plan)
        if result.estimate:
            self.take(strategy, add_staging_slots(result, offload, self.full))
        elif result.fits_host and tries > 1:
            more = max(slack + self.full.room // 1000, result.needed - self.full.peak(plan).device)
            self.put(self.full.seconds(plan), self._level, strategy, offload, level, more, tries - 1)


def fastest_on_device(request: PlanRequest, full: FullModel, among: list[tuple[StrategyFamilies, Cell]]) -> Found | None:
    """The fastest plan that fits. When gradients are reduced and how far units are gathered ahead is chosen last."""
    found = OnDevice(request, full).run([(s, cell) for s, cell in among if cell.plain])
    if found is None:
        return None
    like = [(s, cell) for s, cell in among if s is found.strategy and not cell.plain and _alike(cell, found.result.plan)]
    return OnDevice(request, full, found.result.seconds).run(like) or found


def _alike(cell: Cell, plan: Plan) -> bool:
    return cell.plans[0].batch.micro_batch == plan.batch.micro_batch


def fastest(request: PlanRequest, full: FullModel, among: list[tuple[StrategyFamilies, Cell]]) -> Found | None:
    """The fastest plan that fits, with parts of it away from the device where that is worth it. Activations go to disk only if
    nothing else fits."""
    there = fastest_on_device(request, full, among)
    if there and request.cluster.device.kind == "cpu":  # its memory is the host's
        return there
    limit = WORTH * there.result.seconds if there else float("inf")
    plain = [(s, cell) for s, cell in among if cell.plain and (s.name == "zero3" or there is None or s is there.strategy)]
    away = Offloaded(request, full, limit).run(plain)
    if away is None and there is None and request.disk and "activations" not in request.fixed_homes:
        away = Offloaded(replace(request, disk_activations=True), full).run(plain)
    kept = "optimizer" in request.fixed_homes or "update_kernel" in request.fix  # a chosen kernel needs state on the device
    if away is None and there is not None and not kept:
        return StateAway(request, full, limit).run(among) or there
    return away or there


class StateAway(OnDevice):
    """Plans whose state is off the device though they fit on it: nothing is updated there, and fewer blocks need remat."""

    def begin(self, strategy: StrategyFamilies, cell: Cell) -> None:
        time = self.full.time(cell.plans[0])
        waits = sum(time.exposed.get(name, 0.0) for name in SHORTER)
        self.put(time.seconds - waits - time.compute.get("update", 0.0), self._leave, strategy, cell)

    def _leave(self, strategy: StrategyFamilies, cell: Cell) -> None:
        away = [tuple(replace(u, home=replace(u.home, optimizer="host")) for u in p.units) for p in cell.plans]
        plans = tuple(replace(p, units=units) for p, units in zip(cell.plans, away, strict=True))
        self.put(self.full.seconds(plans[0]), self._first, strategy, replace(cell, plans=plans))
