"""How many device slots streamed optimizer state passes: more than usual where updates wait for the gradient norm, since
state that came to the device ahead of it is updated at once when it is there. The cores then have less to do."""

from dataclasses import replace

from fullshard.plan import Plan
from fullshard.planner.estimate import cores_share
from fullshard.planner.search.full_model import Tried, Whole
from fullshard.planner.search.offload import Ladder, lowest, settle
from fullshard.planner.search.reduced_model import Thin
from fullshard.planner.step.offload_bytes import waits_for_norm
from fullshard.update_pieces import EIGHTHS

STAGINGS = (96, 80, 64, 48, 32, 16, 8)  # tried in place of the usual few, the most first
WORTH = 0.01  # of a step: what updates must keep waiting for more slots to be tried
ALIKE = 0.002  # of a step: for as little no memory is given
MUCH_FASTER = 0.97  # for which the share of the cores is not left to the engine, which measures it
FASTER = 0.995  # of a step's seconds, for which memory is given


def staged(tried: Tried, ladder: Ladder | None, thin: Thin, whole: Whole) -> Tried:
    """The plan with as many slots as make it faster and have room; where they have none, with more away from the device for
    them, if that is faster still."""
    if not _waits(tried, whole):
        return tried
    now = tried.found.step_seconds if tried.found else 0.0
    for plan in _faster(tried.plan, whole, now):
        better = whole.tried(plan, whole.level(plan))
        if better.found is None and ladder is not None:
            better = _higher(replace(ladder, staging=plan.staging, cpu_share=plan.cpu_share, whole={}), thin, whole, now)
        if better.found and better.found.step_seconds < FASTER * now:
            return better
    return tried


def _faster(plan: Plan, whole: Whole, now: float) -> list[Plan]:
    """The plan with other numbers of slots that are faster than it is, the best first; of those that are as fast, the one
    with the fewest slots."""
    shared = _with_share(replace(plan, staging=STAGINGS[0]), whole)
    shares = dict.fromkeys((shared.cpu_share, plan.cpu_share))
    plans = [replace(plan, staging=slots, cpu_share=share) for share in shares for slots in STAGINGS]
    times = {id(p): whole.seconds(p) for p in plans}
    ranked = sorted(plans, key=lambda p: (round(times[id(p)] / (ALIKE * now)), p.staging))
    return [p for p in ranked if times[id(p)] < FASTER * now]


def _with_share(plan: Plan, whole: Whole) -> Plan:
    """The plan with less for the cores to do, where that is much faster: state that came ahead has left the bus to the rest,
    which the balance of bus and cores knows nothing of."""
    if plan.cpu_share is not None:
        return plan
    share = cores_share(plan, whole.wanted.cluster, whole.wanted.optimizer)
    fewer = [replace(plan, cpu_share=eighth / EIGHTHS) for eighth in range(round(share * EIGHTHS))]
    best = min(fewer, key=whole.seconds, default=plan)
    return best if whole.seconds(best) < MUCH_FASTER * whole.seconds(plan) else plan


def _waits(tried: Tried, whole: Whole) -> bool:
    """Whether a step waits for state that is streamed, after a norm. What comes from disk passes slots of its own."""
    plan, found = tried.plan, tried.found
    if found is None or "staging" in whole.wanted.fix or found.cpu_share in (None, 1.0) or found.disk.terms.get("optimizer"):
        return False
    return waits_for_norm(plan, whole.wanted.clip) and found.exposed.get("update", 0.0) > WORTH * found.step_seconds


def _higher(ladder: Ladder, thin: Thin, whole: Whole, beaten: float) -> Tried:
    """With more away, if thinned models say that it is faster."""
    found = lowest(ladder, thin, whole.room, (), slack=True)
    if found is None or found.time.seconds >= FASTER * beaten:
        return Tried(ladder.plan, whole.room + 1)
    return settle(ladder, thin, found.height, whole, (), beaten=beaten)
