"""The answer of the Plan view as JSON: memory, timeline, rates and the plans that lost."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text
from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.observe.page.plan_request import PlanQuestion, refuse_cluster, refuse_model
from fullshard.plan.engine_traits import TRAITS
from fullshard.plan.plan import Plan
from fullshard.planner.estimate import COMPUTE_WORDS, WAIT_WORDS, Estimate
from fullshard.planner.search.alternatives import NothingFitsError, Shortage
from fullshard.planner.search.labels import home_words
from fullshard.planner.search.search import ON_JAX, SearchResult, find_plan
from fullshard.planner.time.lane_spans import lane_spans

# (model, sequence, compute, tensor) to the model's description with costs
Describe = Callable[[str, int, Any, int], Description]
Json = dict[str, Any]
RESERVED = "reserved, not allocated"  # what the allocator takes beside the terms


def plan_answer(question: PlanQuestion, describe: Describe, check: Callable[[], None]) -> Json:
    """What the page shows for a question. What does not fit is an answer too, with the memory that it would need.

    `check` is called now and then; what it raises ends the search.
    """
    refuse_model(question.model)
    refuse_cluster(question.cluster)
    cluster, fix = _cluster(question), dict(question.fix)
    compute = fix.get("compute", cluster.device.peak.fastest)
    if compute not in ("fp32", "bf16", "fp16"):
        raise FullshardError(f"compute must be one of fp32, bf16, fp16, not {compute!r}")
    description = describe(question.model, question.sequence, compute, fix.get("tensor", 1))
    check()
    asked: Json = {"sequence": question.sequence, "global_batch": question.global_batch, "fix": fix, "check": check}
    about: Json = {"command": question.command, "model": question.model, "cluster": question.cluster, "devices": cluster.devices}
    try:
        result = find_plan(description, cluster, **asked)
    except NothingFitsError as error:
        shown = [_shortage_bar(s) for s in error.shortages]
        return about | {"fits": False, "sentence": str(error), "bars": shown}
    check()
    return about | {"fits": True} | _best_plan(result, description, cluster)


def _cluster(question: PlanQuestion) -> Cluster:
    cluster = Cluster.load(question.cluster)
    return cluster if question.price is None else replace(cluster, device=replace(cluster.device, price=question.price))


def _best_plan(result: SearchResult, description: Description, cluster: Cluster) -> Json:
    """What the page shows of the best plan."""
    e, plan = result.estimate, result.plan
    step = lane_spans(plan, description, cluster, cpu_share=e.cpu_share)
    return {
        "sentence": _headline(plan, e),
        "bars": [_bar("this plan", e.device.terms, e.needed, e.available), *_other_tiers(e)],
        "peak_phase": e.peak_phase,
        "choices": _choices(plan),
        "step_seconds": e.step_seconds,
        "rate": e.tokens_per_second,
        "counted": e.counted,
        "mfu": e.mfu,
        "price": e.price,
        "bottleneck": e.bottleneck,
        "calibration": e.calibration,
        "notes": _notes(result),
        "time": _time(e),
        "spans": [[s.lane, s.what, s.unit, s.start, s.end] for s in step.spans],
        "spans_seconds": step.seconds,
        "left_out": step.left_out,
        "alternatives": [
            {"label": a.label, "needed": a.needed, "step_seconds": a.step_seconds, "reason": a.reason}
            for a in result.alternatives
        ],
        "considered": result.considered,
        "search_seconds": result.search_seconds,
        "digest": plan.digest,
        "plan": plan.to_json(),
    }


def _headline(plan: Plan, e: Estimate) -> str:
    homes = home_words(plan)
    return f"fits: needs {bytes_text(e.needed)} of {bytes_text(e.available)} a device{f', with {homes}' if homes else ''}"


def _bar(label: str, terms: dict[str, int], needed: int, room: int) -> Json:
    """A bar that ends at what is needed: the terms, and what the allocator reserves beside them."""
    parts = dict(sorted(terms.items(), key=lambda item: -item[1]))
    if rest := needed - sum(parts.values()):
        parts[RESERVED] = rest
    return {"label": label, "terms": parts, "needed": needed, "available": room}


def _shortage_bar(s: Shortage) -> Json:
    return _bar(s.label, s.peak.terms, s.needed, s.room)


def _other_tiers(e: Estimate) -> list[Json]:
    tiers = (("host, a rank", e.host, e.host_available), ("disk, a rank", e.disk, e.disk_available))
    return [_bar(name, tier.terms, tier.allocated_bytes, room) for name, tier, room in tiers if tier.allocated_bytes]


def _choices(plan: Plan) -> Json:
    remat = sorted({u.remat for u in plan.units if u.remat != "none"})
    return {
        "mesh": f"{plan.mesh} (replicate × shard × tensor)",
        "micro-batch": f"{plan.batch.micro_batch} × {plan.batch.sequence}, {plan.batch.accumulate} accumulated",
        "precision": str(plan.precision),
        "remat": ", ".join(remat) or "none",
        "homes": home_words(plan) or "all on the device",
        "prefetch": str(plan.prefetch),
        "compile": "each block" if plan.compile else "no",
    }


def _time(e: Estimate) -> list[tuple[str, float, str]]:
    """(what, seconds, `compute` or `wait`) of a step, the longest first."""
    parts = [(COMPUTE_WORDS[k], s, "compute") for k, s in e.compute.items()]
    parts += [(WAIT_WORDS[k], s, "wait") for k, s in e.exposed.items()]
    return sorted((p for p in parts if p[1] > 0), key=lambda part: -part[1])


def _notes(result: SearchResult) -> list[str]:
    e = result.estimate
    other = [] if e.calibrated_for_device else ["this device has no calibration of its own, so step times can be further off"]
    return [*e.notes, *other, *([] if TRAITS[result.engine].predicted else [ON_JAX])]
