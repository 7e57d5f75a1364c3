"""The best plan there is: every strategy, mesh, micro-batch and remat choice that fits, ranked by tokens a second; if
none does, with as little as possible away from the device.

Models are thinned to a few of their equal blocks while candidates are compared, and what they lack is added in
proportion; the finalists are estimated whole.
"""

import heapq
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fullshard.cluster.cluster import Cluster
from fullshard.errors import FullshardError, checked_call
from fullshard.model.description import Description
from fullshard.optimizer import AdamW, Optimizer
from fullshard.plan import Batch, Plan, Prefetch
from fullshard.planner.estimate import (
    CAUSES,
    Estimate,
    available,
    cores_share,
    disk_available,
    host_available,
    refuse_uncosted,
)
from fullshard.planner.memory.peak import predict
from fullshard.planner.search.bounds import Candidate, Contest
from fullshard.planner.search.explain import home_words
from fullshard.planner.search.full_model import Tried, Whole
from fullshard.planner.search.offload import Ladder, lowest, settle
from fullshard.planner.search.reduced_model import Thin, blocks_of
from fullshard.planner.search.space import Family, Wanted, precision_of, refuse_idle_backlog, want
from fullshard.planner.search.staging_slots import staged
from fullshard.planner.step.offload_bytes import waits_for_norm
from fullshard.strategies import choose
from fullshard.text import bytes_text, seconds_text
from fullshard.update_pieces import BACKLOG

MOST_HOUSED = 8  # candidates with homes elsewhere that are estimated whole
LIKELY = 0.88  # of the room: what a thinned model needs so much of with homes elsewhere fitted whole, where it was tried
GAIN = 0.995  # of the seconds found: what promises less than this gain is not worth a look


@dataclass(frozen=True)
class Alternative:
    """A plan that was not chosen, and why. `label`: its choices in a few words."""

    label: str
    plan: Plan
    needed: int  # bytes
    step_seconds: float | None  # None if it does not fit
    reason: str


@dataclass(frozen=True)
class Found:
    """The best plan and what it costs; unpacks as `plan, estimate = find_plan(…)`."""

    plan: Plan
    estimate: Estimate
    alternatives: list[Alternative]
    search_seconds: float
    considered: int

    def __iter__(self) -> Iterator[Any]:
        return iter((self.plan, self.estimate))


Final = tuple[Candidate, Estimate]
Change = tuple[str, Wanted, Plan]  # in words; what is wanted then; the leanest plan of that


CALL = "find_plan(on_torch.describe(model, micro_batch=1, sequence=4096), Cluster.load('8xh200'))"


@checked_call(CALL, description=Description, cluster=Cluster)
def find_plan(
    description: Description,
    cluster: Cluster,
    *,
    sequence: int | None = None,
    global_batch: int | None = None,
    fix: dict[str, Any] | None = None,
    limit: int | None = None,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    clip: bool = True,
    disk: bool = True,
) -> Found:
    """The fastest plan for `description` on `cluster` that fits, with its estimate and why others lost.

    `fix` pins any choice (`{"strategy": "zero3", "remat": "full"}`); `limit` is bytes of a device to use. Without a
    sequence and a global batch, those the model was described with count, one micro-batch a rank. `clip`: whether
    gradients are clipped; `disk`: whether anything may go there if nothing else fits.
    """
    began = time.perf_counter()
    refuse_uncosted(description)
    wanted = want(description, cluster, sequence, global_batch, fix or {}, limit, loss, optimizer or AdamW())
    wanted = replace(wanted, clip=clip, disk=disk)
    refuse_idle_backlog(wanted)
    room, thin = available(cluster, limit), _thin(wanted)
    final, contest, housed = _searched(wanted, thin, room)
    if final is None:
        raise FullshardError(_nothing_fits(wanted, thin, [*contest.all, *housed], room))
    best, exact = _staged(wanted, thin, *final)
    alternatives = _alternatives(best, contest, housed, room)
    return Found(best.plan, exact, alternatives, time.perf_counter() - began, len(contest.all) + len(housed))


# -- choosing ------------------------------------------------------------------------------------------------


def _searched(wanted: Wanted, thin: Thin, room: int) -> tuple[Final | None, Contest, list[Candidate]]:
    """The best, if anything fits, and the candidates that were looked at: on the device alone, and with homes elsewhere."""
    contest = Contest(wanted, thin, room)
    final, housed = _finals(wanted, thin, contest), []
    for spill, all_cores in _resorts(wanted):
        if final is None:
            onward = replace(wanted, spill=spill)
            these = [c for family in contest.families for c in _housed(onward, thin, family, room, all_cores)]
            final = _best_housed(onward, thin, these, room)
            housed += these
    return final, contest, housed


def _resorts(wanted: Wanted) -> list[tuple[bool, bool]]:
    """Where nothing fits on the device, one after the other: whether activations may go to disk, and whether the host's cores
    do all updates."""
    spills = (False, True) if wanted.disk and "activations" not in wanted.homes else (False,)
    return [(spill, cores) for spill in spills for cores in ((False, True) if "cpu_share" not in wanted.fix else (False,))]


def _housed(wanted: Wanted, thin: Thin, family: Family, room: int, all_cores: bool) -> Iterator[Candidate]:
    """What of a family fits when parts of it rest elsewhere. Strategies that keep parameters whole only make it harder,
    and on one device all are the same."""
    unit = family[0][1].units[0]
    alike = unit.layout != "sharded" or (wanted.cluster.devices == 1 and not unit.reshard)
    if alike and "strategy" not in wanted.fix:
        return
    leanest = Ladder.of(
        family[-1][1], wanted.description, wanted.homes, all_cores=all_cores, backlog=_backlogs(wanted, family[-1][1])[-1]
    )
    if thin.needed(leanest.at(leanest.top)) > room:
        return
    for label, plan in family:
        height = float("inf")
        for backlog in _backlogs(wanted, plan):
            ladder = Ladder.of(plan, wanted.description, wanted.homes, all_cores=all_cores, backlog=backlog)
            found = lowest(ladder, thin, room, wanted.onward)
            if found and found.height < height:  # backward waits for nothing unless more may stay on the device for it
                height = found.height
                words = ", ".join(filter(None, (label, home_words(ladder.at(height)))))
                yield Candidate(words, plan, found.needed, found.time.seconds, found.time.exposed, ladder, height)


def _backlogs(wanted: Wanted, plan: Plan) -> tuple[int | None, ...]:
    """What of gradients may wait while backward runs: all, or, where they need not wait for the norm, a few."""
    late = waits_for_norm(plan, wanted.clip)
    return (None,) if late or plan.backlog is not None else (None, BACKLOG)


def _finals(wanted: Wanted, thin: Thin, contest: Contest) -> Final | None:
    """The fastest that fits when it is estimated whole, the allocator included, after small changes that help it: always the
    one that promises most is looked at, until none promises more than what was found."""
    best: Final | None = None
    tried: list[Candidate] = []
    while candidate := contest.fastest([c for c in contest.left if c not in tried]):
        if best is not None and candidate.seconds >= GAIN * best[1].step_seconds:
            break
        likely = _reserved(thin, candidate.plan)
        final = _final(wanted, thin, candidate, contest.room) if likely <= contest.room else None
        if final is None:
            candidate.needed = max(candidate.needed, likely)
            contest.advance(candidate)
            continue
        tried.append(candidate)
        if best is None or final[1].step_seconds < best[1].step_seconds:
            best = final
    return best


def _final(wanted: Wanted, thin: Thin, candidate: Candidate, room: int, beaten: float = float("inf")) -> Final | None:
    tried = _whole(wanted, thin, candidate, room, beaten)
    candidate.needed = tried.needed
    if tried.found is None:
        return None
    found = tried.found
    return Candidate(candidate.label, tried.plan, tried.needed, found.step_seconds, found.exposed, candidate.ladder), found


def _best_housed(wanted: Wanted, thin: Thin, housed: list[Candidate], room: int) -> Final | None:
    """The fastest of those with homes elsewhere. Always the one that promises most is looked at: first whether it still does
    with what the allocator adds to a thinned model, then whole; until none promises more than what was found."""
    best: Final | None = None
    queue = [(c.seconds, i, c) for i, c in enumerate(housed)]
    heapq.heapify(queue)
    settled = 0
    while queue and settled < MOST_HOUSED:
        seconds, i, candidate = heapq.heappop(queue)
        if best is not None and seconds >= best[1].step_seconds:
            break
        if not candidate.sure:
            if surer := _surer(wanted, thin, candidate, room):
                heapq.heappush(queue, (surer.seconds, i, surer))
            continue
        settled += 1
        final = _final(wanted, thin, candidate, room, best[1].step_seconds if best else float("inf"))
        if final and (best is None or final[1].step_seconds < best[1].step_seconds):
            best = final
    return best


def _staged(wanted: Wanted, thin: Thin, best: Candidate, exact: Estimate) -> Final:
    """The best with as many slots of staging as help it."""
    tried = staged(Tried(best.plan, best.needed, exact), best.ladder, thin, Whole(wanted))
    assert tried.found is not None
    return replace(best, plan=tried.plan, seconds=tried.found.step_seconds, exposed=tried.found.exposed), tried.found


def _surer(wanted: Wanted, thin: Thin, candidate: Candidate, room: int) -> Candidate | None:
    """A candidate at the height that it takes with what the allocator adds, if there is one."""
    assert candidate.ladder is not None
    found = lowest(candidate.ladder, thin, room, wanted.onward, slack=True)
    if found is None:
        candidate.needed = max(candidate.needed, room + 1, _reserved(thin, candidate.ladder.at(candidate.ladder.top)))
        return None
    return replace(candidate, seconds=found.time.seconds, exposed=found.time.exposed, height=found.height, sure=True)


def _whole(wanted: Wanted, thin: Thin, candidate: Candidate, room: int, beaten: float) -> Tried:
    """The best plan near a candidate, estimated whole; if none fits, the leanest."""
    whole = Whole(wanted)
    if candidate.ladder is not None:
        return settle(candidate.ladder, thin, candidate.height, whole, wanted.onward, beaten)
    leanest = whole.tried(_refined(wanted, thin, candidate.plan, room))
    blocks = [u.name for u in leanest.plan.units if u.remat != "none"]
    for spared in _spared(wanted, thin, leanest, room) if leanest.found else ():
        tried = whole.tried(_relaxed(leanest.plan, blocks[len(blocks) - spared :]))
        if tried.found:
            return tried
    return leanest


def _refined(wanted: Wanted, thin: Thin, plan: Plan, room: int) -> Plan:
    """The plan with changes that make it faster by what thinned models say."""
    for change in (_later_sync, _deeper_prefetch):
        changed = change(wanted, plan)
        if changed and thin.needed(changed) <= room and thin.timeline(changed).seconds < 0.999 * thin.timeline(plan).seconds:
            plan = changed
    return plan


def _spared(wanted: Wanted, thin: Thin, leanest: Tried, room: int) -> list[int]:
    """How many blocks may go without remat: memory grows evenly with them, but for what the allocator makes of it, so fewer
    follow."""
    names = [u.name for u in leanest.plan.units if u.remat != "none"]
    if "remat" in wanted.fix or not names:
        return []
    each = (thin.needed(_relaxed(leanest.plan, names)) - thin.needed(leanest.plan)) / len(names)
    most = min(len(names) - 1, int((room - leanest.needed) / max(each, 1)))
    return sorted({n for n in (most, int(0.85 * most), int(0.6 * most)) if n > 0}, reverse=True)


def _relaxed(plan: Plan, names: list[str]) -> Plan:
    free = set(names)
    return replace(plan, units=tuple(replace(u, remat="none") if u.name in free else u for u in plan.units))


def _thin(wanted: Wanted) -> Thin:
    plan = choose("zero3", wanted.description, devices=wanted.cluster.devices, precision=precision_of(wanted))
    share = cores_share(plan, wanted.cluster, wanted.optimizer)
    common = {"loss": wanted.loss, "optimizer": wanted.optimizer, "clip": wanted.clip, "cpu_share": share}
    return Thin(wanted.description, wanted.cluster, **common)


def _later_sync(wanted: Wanted, plan: Plan) -> Plan | None:
    waits = all(u.layout == "optimizer" for u in plan.units)  # for the last anyway
    if "sync" in wanted.fix or plan.batch.accumulate == 1 or plan.batch.sync == "last" or waits:
        return None
    return replace(plan, batch=replace(plan.batch, sync="last"))


def _deeper_prefetch(wanted: Wanted, plan: Plan) -> Plan | None:
    gathered = any(u.layout == "sharded" for u in plan.units)
    return None if "prefetch" in wanted.fix or not gathered else replace(plan, prefetch=Prefetch(2, 2))


# -- in words ------------------------------------------------------------------------------------------------


def _alternatives(best: Candidate, contest: Contest, housed: list[Candidate], room: int) -> list[Alternative]:
    """The best of each other strategy, and why it lost."""
    shown: dict[str, Alternative] = {}
    others: defaultdict[str, list[Candidate]] = defaultdict(list)
    for candidate in (c for c in [*contest.all, *housed] if _name(c) != _name(best)):
        others[_name(candidate)].append(candidate)
    fitting = [contest.fastest(alike) for alike in others.values()]
    for candidate in sorted((c for c in fitting if c), key=lambda c: c.seconds):
        reason = _why_slower(candidate, best)
        shown[_name(candidate)] = Alternative(candidate.label, candidate.plan, candidate.needed, candidate.seconds, reason)
    leanest = [contest.leanest(alike) for name, alike in others.items() if name not in shown]
    for candidate in sorted(leanest, key=lambda c: c.needed):
        reason = f"needs {bytes_text(candidate.needed)} of {bytes_text(room)}"
        shown[_name(candidate)] = Alternative(candidate.label, candidate.plan, candidate.needed, None, reason)
    return list(shown.values())


def _why_slower(candidate: Candidate, best: Candidate) -> str:
    """By how much, and what it waits for longer than the best does."""
    slower = candidate.seconds / best.seconds - 1
    if slower < 0.005:
        return "as fast"
    more = {k: s - best.exposed.get(k, 0.0) for k, s in candidate.exposed.items() if k != "others"}
    cause, seconds = max(more.items(), key=lambda item: item[1], default=("", 0.0))
    if seconds > 0.3 * (candidate.seconds - best.seconds):
        return f"{slower:.1%} slower: {seconds_text(seconds)} more {CAUSES[cause]}"
    return f"{slower:.1%} slower: more to compute"


def _name(candidate: Candidate) -> str:
    """What is shown once: a strategy, on the device alone and with homes elsewhere."""
    return candidate.label.split(",")[0] + (" away" if candidate.ladder else "")


def _nothing_fits(wanted: Wanted, thin: Thin, failing: list[Candidate], room: int) -> str:
    """What the leanest plan lacks, and the smallest change that would do."""
    leanest = Contest.leanest(failing)
    larger, shorter = _more_devices(wanted), _shorter(wanted, leanest)
    ways = [_freed(wanted, thin, leanest, room), _looser(wanted, room), _first_to_fit(larger, room), _first_to_fit(shorter, room)]
    helps = f"{' or '.join(w for w in ways if w)} would fit"
    if not any(ways):
        ways = [_first_to_fit_elsewhere(larger, room), _first_to_fit_elsewhere(shorter, room)]
        there = "host memory or on disk" if wanted.disk else "host memory"
        helps = f"{' or '.join(w for w in ways if w)} should fit, with what has no room there in {there}"
    if not any(ways):
        helps = "nothing small helps: take devices with more memory"
    return f"nothing fits: the leanest plan ({leanest.label}) needs {_needs(wanted, thin, leanest, room)}; {helps}"


def _needs(wanted: Wanted, thin: Thin, leanest: Candidate, room: int) -> str:
    """What the leanest plan needs, and what it needs where when everything that may leave the device has left it."""

    def told(plan: Plan, needed: int) -> str:
        there, on_disk, most = host_available(wanted.cluster, needed), _on_disk(wanted, plan), disk_available(wanted.cluster)
        lacking = max(0, thin.host(plan) - there) if wanted.onward else 0
        parts = [f"{bytes_text(needed)} of {bytes_text(room)} a device"]
        parts += [f"{bytes_text(thin.host(plan))} of {bytes_text(there)} of the host"] if thin.host(plan) else []
        parts += [f"{bytes_text(on_disk)} of {bytes_text(most)} of the disk"] if on_disk else []
        parts += [f"at least {bytes_text(lacking)} that the host lacks of {bytes_text(most)} of the disk"] if lacking else []
        return " and ".join(parts)

    ladder = Ladder.of(leanest.plan, wanted.description, wanted.homes, all_cores="cpu_share" not in wanted.fix)
    if not ladder.top or wanted.fix.get("tensor", 1) > 1:
        return told(leanest.plan, leanest.needed)
    top = ladder.at(ladder.top)
    if leanest.ladder is not None:  # everything has
        return told(top, _reserved(thin, top))
    return f"{told(leanest.plan, leanest.needed)}, and with {home_words(top)} {told(top, _reserved(thin, top))}"


def _on_disk(wanted: Wanted, plan: Plan) -> int:
    """Bytes of a plan's files."""
    if not any("disk" in (u.home.params, u.home.optimizer, u.home.activations) for u in plan.units):
        return 0
    found = predict(plan, wanted.description, loss=wanted.loss, optimizer=wanted.optimizer, reserved=False, clip=wanted.clip)
    return sum(found.disk.values())


def _freed(wanted: Wanted, thin: Thin, leanest: Candidate, room: int) -> str | None:
    """Homes that were fixed and might be elsewhere."""
    if not wanted.homes:
        return None
    free = replace(wanted, fix={k: v for k, v in wanted.fix.items() if not k.startswith("home.")})
    for candidate in _housed(free, thin, [(leanest.label, leanest.plan)], room, all_cores=False):
        tried = _whole(free, thin, candidate, room, float("inf"))
        if tried.found:
            return f"{home_words(tried.plan)} ({bytes_text(tried.found.host.allocated_bytes)} of the host)"
    return None


def _looser(wanted: Wanted, room: int) -> str | None:
    """A choice that was fixed, without which something fits."""
    for name in ("remat", "micro_batch", "strategy"):
        if name in wanted.fix:
            free = replace(wanted, fix={k: v for k, v in wanted.fix.items() if k != name})
            final, _, _ = _searched(free, _thin(free), room)
            if final:
                return f"another {name} than {wanted.fix[name]!r} ({final[0].label})"
    return None


def _more_devices(wanted: Wanted) -> list[Change]:
    found: list[Change] = []
    devices = wanted.cluster.devices
    while (devices := 2 * devices) <= 16384:
        more = replace(
            wanted, cluster=replace(wanted.cluster, devices=devices), global_batch=max(wanted.global_batch, devices), fix={}
        )
        plan = choose(
            "zero3",
            wanted.description,
            devices=devices,
            precision=precision_of(more),
            batch=Batch(1, wanted.sequence),
            remat="full" if blocks_of(wanted.description) else "none",
        )
        found.append((f"{devices} devices", more, plan))
    return found


def _shorter(wanted: Wanted, leanest: Candidate) -> list[Change]:
    assert wanted.description.costs is not None
    if wanted.description.costs.shape is not None:
        return []
    found: list[Change] = []
    length = wanted.sequence
    while (length := length // 2) >= 256:
        plan = replace(leanest.plan, batch=replace(leanest.plan.batch, sequence=length))
        found.append((f"a sequence of {length}", wanted, plan))
    return found


def _first_to_fit(changes: list[Change], room: int) -> str | None:
    return next((words for words, wanted, plan in changes if _would_fit(wanted, _thin(wanted), plan, room)), None)


def _first_to_fit_elsewhere(changes: list[Change], room: int) -> str | None:
    """By thinned models alone, which is why not all of the room counts, and as if a greater change never needed more."""
    at = bisect_left(changes, True, key=lambda change: _has_homes(change[1], change[2], int(LIKELY * room)))
    return changes[at][0] if at < len(changes) else None


def _has_homes(wanted: Wanted, plan: Plan, room: int) -> bool:
    thin = _thin(wanted)
    for spill, all_cores in _resorts(wanted):
        onward = replace(wanted, spill=spill)
        if any(_surer(onward, thin, c, room) for c in _housed(onward, thin, [("", plan)], room, all_cores)):
            return True
    return False


def _would_fit(wanted: Wanted, thin: Thin, plan: Plan, room: int) -> bool:
    return thin.needed(plan) <= room and _reserved(thin, plan) <= room and Whole(wanted).tried(plan).found is not None


def _reserved(thin: Thin, plan: Plan) -> int:
    """Bytes that a plan is likely to need, with what the allocator adds."""
    return thin.needed(plan) + thin.slack(plan)


def summary(found: Found) -> str:
    """The winner, and why the runners-up lost."""
    lines = [f"{a.label}: {a.reason}" for a in found.alternatives]
    plans = "1 plan" if found.considered == 1 else f"{found.considered} plans"
    head = f"{plans} considered in {seconds_text(found.search_seconds)}{'; the others:' if lines else ''}"
    return "\n".join([head, *[f"  {line}" for line in lines]])
