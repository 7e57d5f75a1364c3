"""The orders in which parts of a plan can leave the device, and about how far they must go."""

import math
from collections.abc import Iterator

from fullshard.plan.plan import Home, Plan
from fullshard.plan.update_pieces import BACKLOG
from fullshard.planner.estimate import host_available
from fullshard.planner.search.exact_estimates import FullModel
from fullshard.planner.search.offload_levels import TOGETHER, OffloadLevels, lowest_level
from fullshard.planner.search.plan_space import PlanRequest
from fullshard.planner.step.offload_bytes import slots_of, waits_for_norm

PROMISED = 0.95  # of the seconds that are interpolated between levels: exact ones can be fewer

Leaving = tuple[float, float, OffloadLevels]  # about how many seconds a step takes, at about which level, of what


def offloaded_candidates(request: PlanRequest, full: FullModel, plan: Plan) -> Iterator[Leaving]:
    """The ways to make a plan fit by as little away from the device as it takes.

    Strategies that keep parameters whole are skipped unless they are fixed: they need more memory. So are all but one on
    a single device, where they are the same.
    """
    unit = plan.units[0]
    skipped = unit.layout != "sharded" or (request.cluster.devices == 1 and not unit.reshard)
    if skipped and "strategy" not in request.fix:
        return
    seen: list[tuple[Home, ...]] = []
    for order in _orders(request, full, plan):
        for all_cores in (False, True) if "cpu_share" not in request.fix else (False,):  # the cores need less of the device
            lowest = float("inf")
            for backlog in _backlogs(request, plan):
                offload = OffloadLevels.of(
                    plan, request.description, request.fixed_homes, all_cores=all_cores, backlog=backlog, order=order
                )
                found = lowest_level(offload, full, request.to_disk)
                if found and found.level < lowest and not _known(offload, found.level, seen):
                    lowest = found.level  # a backlog slows backward down: it must keep more on the device in return
                    yield PROMISED * found.seconds, found.level, offload
        seen.append(offload.levels)


def _orders(request: PlanRequest, full: FullModel, plan: Plan) -> list[str]:
    offload = OffloadLevels.of(plan, request.description, request.fixed_homes)
    scarce = sum(full.peak(offload.at(1)).host.values()) > host_available(request.cluster, full.room) if offload.top else False
    together = scarce and plan.pairs(TOGETHER, slots_of(request.optimizer))
    saves = any(u.kind == "block" for u in request.description.units) and all(u.remat == "none" for u in plan.units)
    return ["state", *(["together"] if together else []), *(["activations", "parameters last"] if saves else [])]


def _known(offload: OffloadLevels, level: float, seen: list[tuple[Home, ...]]) -> bool:
    """True if another order has the same levels up to this one."""
    up_to = offload.levels[: math.ceil(level) + 1]
    return any(levels[: len(up_to)] == up_to for levels in seen)


def _backlogs(request: PlanRequest, plan: Plan) -> tuple[int | None, ...]:
    """Backlogs to try: none, and a small one where gradients need not wait for the norm."""
    late = waits_for_norm(plan, request.clip)
    return (None,) if late or plan.backlog is not None else (None, BACKLOG)
