"""The number of device slots that optimizer state is streamed through.

Where updates wait for the gradient norm, more slots are faster: state that is on the device already is updated as soon as
the norm is known. The cores then have less to do.
"""

from dataclasses import replace

from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.plan.optimizer import AdamW, Optimizer
from fullshard.plan.plan import Plan
from fullshard.plan.update_pieces import EIGHTHS, STAGING
from fullshard.planner.estimate import Estimate, cores_share, refuse_uncosted
from fullshard.planner.search.exact_estimates import FullModel, FullResult
from fullshard.planner.search.offload_levels import OffloadLevels, lowest_level, place_level
from fullshard.planner.search.plan_space import PlanRequest
from fullshard.planner.step.offload_bytes import waits_for_norm

STAGINGS = (96, 80, 64, 48, 32, 16, 8)  # numbers of slots to try
WORTH_TRYING = 0.01  # of a step: try more slots if it waits longer than this for updates
SAME_SPEED = 0.002  # of a step: smaller gains do not justify more slots
MUCH_FASTER = 0.97  # of step time: only then fix `cpu_share`, which the engine else measures
TRIES = 2  # numbers of slots for which more leaves the device
FASTER = 0.995  # of step time: only then use more memory


def tune_updates(
    plan: Plan,
    description: Description,
    cluster: Cluster,
    *,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    clip: bool = True,
    limit: int | None = None,
) -> tuple[Plan, Estimate | None]:
    """The plan with the `staging` and `cpu_share` that make it fastest in the memory that it leaves free, and its estimate.

    The plan itself, where its updates do not wait for a norm or it sets one of the two; without an estimate, where it does not
    fit. `limit`: bytes of a device to use.
    """
    refuse_uncosted(description)
    rows, sequence = plan.batch.micro_batch * plan.batch.accumulate * plan.mesh.data, plan.batch.sequence
    fixed = {"staging": plan.staging} if plan.staging != STAGING or plan.cpu_share is not None else {}
    request = PlanRequest(description, cluster, sequence, rows, fixed, limit, loss, optimizer or AdamW(), clip=clip)
    full = FullModel(request)
    found = add_staging_slots(full.judge(plan), None, full)
    return found.plan, found.estimate


def add_staging_slots(result: FullResult, offload: OffloadLevels | None, full: FullModel) -> FullResult:
    """The plan with the number of slots that makes it fastest. If the slots have no room, more leaves the device for them,
    provided that the step is still faster."""
    if not _waits_for_state(result, full):
        return result
    now, tries = result.seconds, TRIES
    for plan in _faster_plans(result.plan, full, now):
        better = full.judge(plan)
        if better.estimate is None and offload is not None and tries:
            tries -= 1
            better = _at_higher_level(replace(offload, staging=plan.staging, cpu_share=plan.cpu_share, made={}), full, now)
        if better.estimate and better.estimate.step_seconds < FASTER * now:
            return _with_reserve(better, full)
    return result


def _with_reserve(result: FullResult, full: FullModel) -> FullResult:
    """The plan with the next larger number of slots, if it fits and is predicted to be as fast. Real links are less steady than
    predicted ones: on an H200, 48 slots took 6% longer than 64, for which the prediction is the same."""
    assert result.estimate is not None
    more = min((slots for slots in STAGINGS if slots > result.plan.staging), default=None)
    if more is None:
        return result
    plan = replace(result.plan, staging=more)
    found = full.judge(plan)
    slower = found.estimate is None or found.estimate.step_seconds > (1 + SAME_SPEED) * result.estimate.step_seconds
    return result if slower else found


def _faster_plans(plan: Plan, full: FullModel, now: float) -> list[Plan]:
    """The plan with other numbers of slots, those that are faster, the fastest first; fewer slots first at the same speed."""
    shared = _with_share(replace(plan, staging=STAGINGS[0]), full)
    shares = dict.fromkeys((shared.cpu_share, plan.cpu_share))
    plans = [replace(plan, staging=slots, cpu_share=share) for share in shares for slots in STAGINGS]
    times = {id(p): full.seconds(p) for p in plans}
    ranked = sorted(plans, key=lambda p: (round(times[id(p)] / (SAME_SPEED * now)), p.staging))
    return [p for p in ranked if times[id(p)] < FASTER * now]


def _with_share(plan: Plan, full: FullModel) -> Plan:
    """The plan with a smaller `cpu_share`, if that is much faster.

    State that is on the device ahead of the norm leaves PCIe to the rest. The usual balance does not know that.
    """
    if plan.cpu_share is not None:
        return plan
    share = cores_share(plan, full.request.cluster, full.request.optimizer)
    fewer = [replace(plan, cpu_share=eighth / EIGHTHS) for eighth in range(round(share * EIGHTHS))]
    best = min(fewer, key=full.seconds, default=plan)
    return best if full.seconds(best) < MUCH_FASTER * full.seconds(plan) else plan


def _waits_for_state(result: FullResult, full: FullModel) -> bool:
    """True if a step waits for streamed state after the norm. State on disk has slots of its own."""
    plan, found = result.plan, result.estimate
    if found is None or "staging" in full.request.fix or found.cpu_share in (None, 1.0) or found.disk.terms.get("optimizer"):
        return False
    return waits_for_norm(plan, full.request.clip) and found.exposed.get("update", 0.0) > WORTH_TRYING * found.step_seconds


def _at_higher_level(offload: OffloadLevels, full: FullModel, faster_than: float) -> FullResult:
    """The plan with more away from the device, if that is faster."""
    found = lowest_level(offload, full, ())
    placed = found and found.seconds < FASTER * faster_than and place_level(offload, found.level, full, (), full.room)
    if not placed or full.seconds(placed[1]) >= FASTER * faster_than:
        return FullResult(offload.plan, full.room + 1)
    return full.judge(placed[1])
