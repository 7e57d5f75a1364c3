"""The pick of a search: the fastest plan that fits, by lower bounds first and exact estimates last.

If nothing fits on the devices, parts of a plan leave them.
"""

import heapq
from collections.abc import Iterator
from dataclasses import replace

from fullshard.plan.plan import Plan, Prefetch
from fullshard.plan.update_pieces import BACKLOG
from fullshard.planner.estimate import Estimate, cores_share, host_available
from fullshard.planner.search.bounds import Candidate, CandidatePool
from fullshard.planner.search.exact_estimates import FullModel, FullResult
from fullshard.planner.search.labels import home_words
from fullshard.planner.search.offload_levels import TOGETHER, LevelEstimate, OffloadLevels, fit_level, lowest_level, uses_disk
from fullshard.planner.search.plan_space import Family, PlanRequest, precision_of
from fullshard.planner.search.reduced_model import ReducedModel
from fullshard.planner.search.staging_slots import add_staging_slots
from fullshard.planner.step.offload_bytes import slots_of, waits_for_norm
from fullshard.planner.strategies import choose

MOST_OFFLOADED = 8  # candidates with offload that are estimated exactly
GAIN = 0.995  # of the best step time: candidates that promise less than this gain are not estimated

Final = tuple[Candidate, Estimate]


def reduced_model(request: PlanRequest) -> ReducedModel:
    """The reduced model that answers for the plans of a request."""
    plan = choose("zero3", request.description, devices=request.cluster.devices, precision=precision_of(request))
    share = cores_share(plan, request.cluster, request.optimizer)
    arguments = {"loss": request.loss, "optimizer": request.optimizer, "clip": request.clip, "cpu_share": share}
    return ReducedModel(request.description, request.cluster, **arguments, engine=request.engine)


def pick(request: PlanRequest, reduced: ReducedModel, room: int) -> tuple[Final | None, CandidatePool, list[Candidate]]:
    """The best candidate, or None if nothing fits; every candidate without offload; every candidate with it."""
    pool = CandidatePool(request, reduced, room)
    final, offloaded = _best_on_device(request, reduced, pool), []
    for activations, all_cores in offload_modes(request):
        if final is None or (all_cores and not activations and uses_disk(final[0].plan)):
            asked = replace(request, disk_activations=activations)
            these = [c for family in pool.families for c in offloaded_candidates(asked, reduced, family, room, all_cores)]
            found = _best_offloaded(asked, reduced, these, room)
            final = min((f for f in (final, found) if f), key=lambda f: f[1].step_seconds, default=None)
            offloaded += these
    return final, pool, offloaded


def offload_modes(request: PlanRequest) -> list[tuple[bool, bool]]:
    """In the order to try: (activations may go to disk, the host's cores do all updates). Updates by the cores need less of the
    device: they may spare the disk."""
    spills = (False, True) if request.disk and "activations" not in request.fixed_homes else (False,)
    return [(spill, cores) for spill in spills for cores in ((False, True) if "cpu_share" not in request.fix else (False,))]


def offloaded_candidates(
    request: PlanRequest, reduced: ReducedModel, family: Family, room: int, all_cores: bool
) -> Iterator[Candidate]:
    """Plans of a family that fit when parts of them leave the device.

    Strategies that keep parameters whole are skipped unless they are fixed: they need more memory. So are all but one on
    a single device, where they are the same.
    """
    unit = family[0][1].units[0]
    skipped = unit.layout != "sharded" or (request.cluster.devices == 1 and not unit.reshard)
    if skipped and "strategy" not in request.fix:
        return
    last = family[-1][1]
    leanest = _levels(request, last, all_cores, _backlogs(request, last)[-1])
    if reduced.needed(leanest.at(leanest.top)) > room:
        return
    for label, plan in family:
        request.check()
        level = float("inf")
        for backlog in _backlogs(request, plan):
            offload = _levels(request, plan, all_cores, backlog)
            found = lowest_level(offload, reduced, room, request.to_disk)
            if found and found.level < level:  # a backlog slows backward down: it must keep more on the device in return
                level = found.level
                yield _candidate(label, offload, found)
            scarce = reduced.host(offload.at(1)) > host_available(request.cluster, room)
            if scarce and plan.pairs(TOGETHER, slots_of(request.optimizer)):
                offload = _levels(request, plan, all_cores, backlog, together=True)
                if found := lowest_level(offload, reduced, room, request.to_disk):
                    yield _candidate(label, offload, found)


def _candidate(label: str, offload: OffloadLevels, found: LevelEstimate) -> Candidate:
    words = ", ".join(filter(None, (label, home_words(offload.at(found.level)))))
    return Candidate(words, offload.plan, found.needed, found.time.seconds, found.time.exposed, offload, found.level)


def _levels(request: PlanRequest, plan: Plan, all_cores: bool, backlog: int | None, *, together: bool = False) -> OffloadLevels:
    about = {"all_cores": all_cores, "backlog": backlog, "together": together}
    return OffloadLevels.of(plan, request.description, request.fixed_homes, **about)  # type: ignore[arg-type]


def _backlogs(request: PlanRequest, plan: Plan) -> tuple[int | None, ...]:
    """Backlogs to try: none, and a small one where gradients need not wait for the norm."""
    late = waits_for_norm(plan, request.clip)
    return (None,) if late or plan.backlog is not None else (None, BACKLOG)


def _best_on_device(request: PlanRequest, reduced: ReducedModel, pool: CandidatePool) -> Final | None:
    """The fastest candidate without offload whose exact estimate fits.

    Candidates are estimated in order of their promised seconds, until none promises more than the best so far.
    """
    best: Final | None = None
    tried: list[Candidate] = []
    while candidate := pool.fastest([c for c in pool.left if c not in tried]):
        request.check()
        if best is not None and candidate.seconds >= GAIN * best[1].step_seconds:
            break
        likely = reduced.reserved(candidate.plan)
        final = _final(request, reduced, candidate, pool.room) if likely <= pool.room else None
        if final is None:
            candidate.needed = max(candidate.needed, likely)
            pool.advance(candidate)
            continue
        tried.append(candidate)
        if best is None or final[1].step_seconds < best[1].step_seconds:
            best = final
    return best


def _final(
    request: PlanRequest, reduced: ReducedModel, candidate: Candidate, room: int, faster_than: float = float("inf")
) -> Final | None:
    """The candidate with its exact estimate, if it fits."""
    result = exact_result(request, reduced, candidate, room, faster_than)
    candidate.needed = result.needed
    if result.estimate is None:
        return None
    found = result.estimate
    return Candidate(candidate.label, result.plan, result.needed, found.step_seconds, found.exposed, candidate.offload), found


def _best_offloaded(request: PlanRequest, reduced: ReducedModel, candidates: list[Candidate], room: int) -> Final | None:
    """The fastest candidate with offload whose exact estimate fits.

    The most promising one is looked at first: once more with what the allocator adds, then exactly. Ends when none promises
    more than the best so far.
    """
    best: Final | None = None
    queue = [(c.seconds, i, c) for i, c in enumerate(candidates)]
    heapq.heapify(queue)
    estimated = 0
    while queue and estimated < MOST_OFFLOADED:
        seconds, i, candidate = heapq.heappop(queue)
        if best is not None and seconds >= best[1].step_seconds:
            break
        if not candidate.with_slack:
            if allowed := with_slack(request, reduced, candidate, room):
                heapq.heappush(queue, (allowed.seconds, i, allowed))
            continue
        estimated += 1
        final = _final(request, reduced, candidate, room, best[1].step_seconds if best else float("inf"))
        if final and (best is None or final[1].step_seconds < best[1].step_seconds):
            best = final
    return best


def with_slack(request: PlanRequest, reduced: ReducedModel, candidate: Candidate, room: int) -> Candidate | None:
    """The candidate at the level that it needs with what the allocator adds; None if there is no such level."""
    assert candidate.offload is not None
    found = lowest_level(candidate.offload, reduced, room, request.to_disk, slack=True)
    if found is None:
        top = candidate.offload.at(candidate.offload.top)
        candidate.needed = max(candidate.needed, room + 1, reduced.reserved(top))
        return None
    return replace(candidate, seconds=found.time.seconds, exposed=found.time.exposed, level=found.level, with_slack=True)


def with_staging(request: PlanRequest, reduced: ReducedModel, best: Candidate, exact: Estimate) -> Final:
    """The best candidate with as many staging slots as make it faster."""
    result = add_staging_slots(FullResult(best.plan, best.needed, exact), best.offload, reduced, FullModel(request))
    assert result.estimate is not None
    found = result.estimate
    return replace(best, plan=result.plan, seconds=found.step_seconds, exposed=found.exposed), found


def exact_result(request: PlanRequest, reduced: ReducedModel, candidate: Candidate, room: int, faster_than: float) -> FullResult:
    """The exact result of the best plan near a candidate; if none fits, of the leanest."""
    full = FullModel(request)
    if candidate.offload is not None:
        return fit_level(candidate.offload, reduced, candidate.level, full, request.to_disk, faster_than)
    leanest = full.judge(_refined(request, reduced, candidate.plan, room))
    blocks = [u.name for u in leanest.plan.units if u.remat != "none"]
    for count in _blocks_without_remat(request, reduced, leanest, room) if leanest.estimate else ():
        result = full.judge(_without_remat(leanest.plan, blocks[len(blocks) - count :]))
        if result.estimate:
            return result
    return leanest


def _refined(request: PlanRequest, reduced: ReducedModel, plan: Plan, room: int) -> Plan:
    """The plan with small changes that make it faster by the reduced model."""
    for change in (_later_sync, _deeper_prefetch) if request.engine == "torch" else ():
        changed = change(request, plan)
        if changed and reduced.needed(changed) <= room:
            plan = changed if reduced.timeline(changed).seconds < 0.999 * reduced.timeline(plan).seconds else plan
    return plan


def _blocks_without_remat(request: PlanRequest, reduced: ReducedModel, leanest: FullResult, room: int) -> list[int]:
    """Numbers of blocks to try without remat, the most first.

    Memory grows evenly with them, but the allocator may add to it: so smaller numbers follow.
    """
    names = [u.name for u in leanest.plan.units if u.remat != "none"]
    if "remat" in request.fix or not names:
        return []
    each = (reduced.needed(_without_remat(leanest.plan, names)) - reduced.needed(leanest.plan)) / len(names)
    most = min(len(names) - 1, int((room - leanest.needed) / max(each, 1)))
    return sorted({n for n in (most, int(0.85 * most), int(0.6 * most)) if n > 0}, reverse=True)


def _without_remat(plan: Plan, names: list[str]) -> Plan:
    free = set(names)
    return replace(plan, units=tuple(replace(u, remat="none") if u.name in free else u for u in plan.units))


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
