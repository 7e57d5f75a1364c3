"""The pick of a search, and the best plans of the other strategies beside it."""

from collections.abc import Callable
from dataclasses import dataclass

from fullshard.plan.plan import Home
from fullshard.planner.search.best_first import fastest, fastest_on_device
from fullshard.planner.search.exact_estimates import FullModel, FullResult
from fullshard.planner.search.labels import plan_label
from fullshard.planner.search.plan_space import PlanRequest, StrategyFamilies, strategies
from fullshard.planner.search.strategy_cells import Cell, cells

Cells = list[tuple[StrategyFamilies, Cell]]


@dataclass(frozen=True)
class Best:
    """The best plan of a strategy; without an estimate, its leanest one, which does not fit."""

    strategy: StrategyFamilies
    result: FullResult

    @property
    def label(self) -> str:
        return plan_label(self.strategy.name, self.strategy.choices, self.result.plan)


@dataclass(frozen=True)
class Pick:
    """The fastest plan; if nothing fits, the leanest. `others`: finds the best of each other strategy with everything on the
    device: first those that fit, the fastest first."""

    best: Best
    considered: int  # plans
    others: Callable[[], list[Best]]


def pick(request: PlanRequest) -> Pick:
    full = FullModel(request)
    every: Cells = [(strategy, cell) for strategy in strategies(request) for cell in cells(request, full, strategy.families)]
    found = fastest(request, full, every)
    best = Best(found.strategy, found.result) if found else _leanest(full, every)
    besides = None if any(u.home != Home() for u in best.result.plan.units) else best.strategy
    return Pick(best, sum(len(cell.plans) for _, cell in every), lambda: _others(request, full, every, besides))


def _others(request: PlanRequest, full: FullModel, every: Cells, besides: StrategyFamilies | None) -> list[Best]:
    found = []
    for strategy in {id(s): s for s, _ in every if s is not besides}.values():
        its = [(s, cell) for s, cell in every if s is strategy]
        best = fastest_on_device(request, full, its)
        found.append(Best(strategy, best.result) if best else _leanest(full, its))
    return sorted(found, key=lambda best: (best.result.seconds, best.result.needed))


def _leanest(full: FullModel, among: Cells) -> Best:
    """The plan that needs the fewest bytes of the device, with what the allocator adds where it is not too large without."""
    strategy, plan = min(((s, cell.plans[-1]) for s, cell in among), key=lambda found: full.peak(found[1]).device)
    return Best(strategy, full.judge(plan))
