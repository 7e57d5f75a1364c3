"""The plans of a strategy that a search looks at, in cells that differ in remat alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from fullshard.plan.plan import Plan, Prefetch
from fullshard.planner.search.exact_estimates import FullModel
from fullshard.planner.search.plan_space import Family, PlanRequest


@dataclass(frozen=True)
class Cell:
    """Plans that differ in remat alone, the fastest first. `bound`: seconds that no plan of the cell falls short of."""

    plans: tuple[Plan, ...]
    bound: Callable[[], float]
    plain: bool  # the strategy as it is: gradients reduced after every micro-batch, one unit gathered ahead


def cells(request: PlanRequest, full: FullModel, families: list[Family]) -> list[Cell]:
    """The cells of a strategy: of each batch, when gradients are reduced and how far units are gathered ahead."""
    found = []
    for family in families:
        for i, plans in enumerate(_variants(request, family)):
            found.append(Cell(tuple(plans), partial(full.bound, plans[0]), plain=i == 0))
    return found


def _variants(request: PlanRequest, family: Family) -> Iterator[list[Plan]]:
    plans = [plan for _, plan in family]
    changes = [_as_they_are, _later_sync] if request.engine == "torch" else [_as_they_are]
    for sync in changes:
        if sync(request, plans[0]) is None:
            continue
        yield [p for plan in plans if (p := sync(request, plan))]
        if request.engine == "torch" and _deeper_prefetch(request, plans[0]):
            yield [q for plan in plans if (p := sync(request, plan)) and (q := _deeper_prefetch(request, p))]


def _as_they_are(request: PlanRequest, plan: Plan) -> Plan | None:
    return plan


def _later_sync(request: PlanRequest, plan: Plan) -> Plan | None:
    """The plan with gradients reduced after the last micro-batch only, if that is a change and not fixed."""
    late_anyway = all(u.layout == "optimizer" for u in plan.units)
    if "sync" in request.fix or plan.batch.accumulate == 1 or plan.batch.sync == "last" or late_anyway:
        return None
    return replace(plan, batch=replace(plan.batch, sync="last"))


def _deeper_prefetch(request: PlanRequest, plan: Plan) -> Plan | None:
    """The plan with two units gathered ahead, if anything is gathered and no depth is fixed."""
    gathered = any(u.layout == "sharded" for u in plan.units)
    fixed = any(name.startswith("prefetch") for name in request.fix)
    return None if fixed or not gathered else replace(plan, prefetch=Prefetch(2, 2))


def with_least_remat(full: FullModel, plan: Plan, room: int) -> Plan | None:
    """The plan with remat in as few blocks as fit; None if it does not fit with remat in all."""
    names = [u.name for u in plan.units if u.remat != "none"]
    count = _most(full, plan, names, room)
    return None if count is None else without_remat(plan, names[len(names) - count :])


def _most(full: FullModel, plan: Plan, names: list[str], room: int) -> int | None:
    """The largest number of last blocks without remat that fits; None if none fits. Bytes grow about evenly with them."""

    def over(count: int) -> int:
        """Bytes by which the plan is too large with so many blocks without remat."""
        return full.peak(without_remat(plan, names[len(names) - count :])).device - room

    low, high = (0, over(0)), (len(names) + 1, over(len(names))) if names else (1, 1)
    if low[1] > 0:
        return None
    if high[1] <= 0:
        return len(names)
    while high[0] - low[0] > 1:
        share = -low[1] / (high[1] - low[1])
        middle = min(max(low[0] + round(share * (high[0] - low[0])), low[0] + 1), high[0] - 1)
        found = (middle, over(middle))
        low, high = (found, high) if found[1] <= 0 else (low, found)
    return low[0]


def without_remat(plan: Plan, names: list[str]) -> Plan:
    free = set(names)
    if not free:
        return plan
    return replace(plan, units=tuple(replace(u, remat="none") if u.name in free else u for u in plan.units))
