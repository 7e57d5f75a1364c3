"""One change that would make the profiled step faster, with what the planner expects it to save."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from fullshard.base.errors import FullshardError
from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.plan.engine_traits import TRAITS
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan, Prefetch, Remat
from fullshard.planner.estimate import Estimate, available, cores_share, host_available
from fullshard.planner.memory.peak_memory import predict
from fullshard.planner.time.timeline import timeline

LEAST = 0.01  # of a step: a smaller gain is not recommended
EXPOSED = {  # the planner's causes of waiting, by the lane of a profile that shows them
    "communication": ("gather", "reduce", "copies", "tensor", "experts", "others"),
    "transfers": ("update", "fetch", "spill"),
    "launch": ("host",),
}


@dataclass(frozen=True)
class PlannedStep:
    """What the planner knows of a run. `loaders`: how many load data ahead on a rank; 0 if the step loads its
    own."""

    plan: Plan
    description: Description | None
    cluster: Cluster
    estimate: Estimate | None
    loss: Literal["chunked", "plain"]
    optimizer: Optimizer
    clip: bool
    loaders: int


def predicted_lanes(estimate: Estimate) -> dict[str, Any]:
    """The estimate in the lanes of a profile."""
    lanes = {lane: sum(estimate.exposed.get(cause, 0.0) for cause in causes) for lane, causes in EXPOSED.items()}
    compute = sum(estimate.compute.values()) + estimate.exposed.get("crowding", 0.0)
    lanes = {"compute": compute, "communication": lanes["communication"], "transfers": lanes["transfers"]} | {
        "data": 0.0,
        "launch": lanes["launch"],
    }
    lanes["idle"] = max(0.0, estimate.step_seconds - sum(lanes.values()))
    busy = {"compute": estimate.lanes.get("compute", 0.0), "gather": estimate.lanes.get("gather", 0.0)}
    busy |= {"reduce": estimate.lanes.get("reduce", 0.0), "all_reduce": estimate.lanes.get("copies", 0.0)}
    return {"step_seconds": estimate.step_seconds, "lanes": lanes, "busy": busy, "exposed": dict(estimate.exposed)}


def recommend(profile: dict[str, Any], step: PlannedStep | None) -> dict[str, Any] | None:
    """The change that saves the most of a step; None if none saves a hundredth of it. `profile`: a profile's summary."""
    options = [*_slow_rank(profile), *_more_workers(profile, step.loaders if step else 1)]
    if step is not None and step.description is not None and step.estimate is not None:
        options += _other_plans(profile, step)
    best = max(options, key=lambda o: o["saves_seconds"], default=None)
    return best if best and best["saves_share"] > LEAST else None


def _option(profile: dict[str, Any], change: str, why: str, saves: float) -> dict[str, Any]:
    return {"change": change, "why": why, "saves_seconds": saves, "saves_share": saves / profile["step_seconds"]}


def _slow_rank(profile: dict[str, Any]) -> Iterator[dict[str, Any]]:
    slow = profile["slowest"]
    if slow and slow["slow"] and slow["lane"] != "data":
        saves = slow["own_seconds"] - slow["others_seconds"]
        where = f", in unit {slow['unit']}" if slow["unit"] else ""
        yield _option(
            profile,
            f"make rank {slow['rank']} as fast as the others: look at its host and device",
            f"the others wait for it in collectives; it loses the time in {LANE_WORDS[slow['lane']]}{where}",
            saves,
        )


def _more_workers(profile: dict[str, Any], loaders: int) -> Iterator[dict[str, Any]]:
    """Enough workers to load a step's data in the time of the rest of the step, or one more."""
    step, wait = profile["step_seconds"], max(r["lanes"]["data"] for r in profile["ranks"])
    rest = step - wait
    if wait <= LEAST * step or rest <= 0:
        return
    loading = wait if loaders == 0 else loaders * step  # of one worker, for the data of a step
    needed = max(loaders + 1, math.ceil(loading / rest))
    saves = step - max(rest, loading / needed)
    yield _option(profile, f"data.workers = {needed}", "the step waits for data", saves)


def _other_plans(profile: dict[str, Any], step: PlannedStep) -> Iterator[dict[str, Any]]:
    """Single changes of the plan that fit, with the share of a step that the planner expects them to save."""
    plan, description, cluster = step.plan, step.description, step.cluster
    assert description is not None
    assert step.estimate is not None
    for change, why, other in _changes(plan, compiled=TRAITS[profile["engine"]].one_program):
        common: dict[str, Any] = {"loss": step.loss, "optimizer": step.optimizer, "clip": step.clip}
        common["cpu_share"] = cores_share(other, cluster, step.optimizer)
        try:
            peak = predict(other, description, reserved=False, **common)
            if peak.allocated > available(cluster) or sum(peak.host.values()) > host_available(cluster, peak.allocated):
                continue
            seconds = timeline(other, description, cluster, **common).seconds
        except FullshardError:
            continue  # the model was not traced for it
        share = 1 - seconds / step.estimate.step_seconds
        if share > 0:
            yield _option(profile, change, why, share * profile["step_seconds"])


def _changes(plan: Plan, *, compiled: bool) -> Iterator[tuple[str, str, Plan]]:
    """Changes in words, why they help, and the plans. `compiled`: XLA compiles the whole step, and orders its gathers."""
    deepest = min(plan.prefetch.forward, plan.prefetch.backward)
    if not compiled and deepest < 2 and any(u.layout == "sharded" for u in plan.units):
        yield "plan.prefetch = 2", "gathers begin earlier", replace(plan, prefetch=Prefetch(2, 2))
    order: tuple[Remat, ...] = ("full", "selective", "none")
    used = {u.remat for u in plan.units if u.remat != "none"}
    for remat in order[1 + min((order.index(r) for r in used), default=2) :]:
        units = tuple(replace(u, remat=remat) if u.remat != "none" else u for u in plan.units)
        yield f"plan.remat = '{remat}'", "less is computed again in backward", replace(plan, units=units)
    if any(u.layout == "sharded" and u.reshard is not False for u in plan.units) and plan.mesh.shard > 1:
        units = tuple(replace(u, reshard=False) if u.layout == "sharded" else u for u in plan.units)
        yield "plan.strategy = 'zero2'", "parameters are gathered once a step", replace(plan, units=units)
    if plan.batch.accumulate > 1 and plan.batch.sync == "every":
        last = replace(plan, batch=replace(plan.batch, sync="last"))
        yield "plan.sync = 'last'", "gradients are reduced once a step", last
    if not (plan.compile or compiled):
        yield "plan.compile = true", "fewer and larger kernels are launched", replace(plan, compile=True)
    for kind in ("optimizer", "activations", "params"):
        units = tuple(replace(u, home=replace(u.home, **{kind: "device"})) for u in plan.units)  # type: ignore[arg-type]
        if units != plan.units:
            yield f"home.{kind} = 'device'", "nothing of it crosses PCIe", replace(plan, units=units)


LANE_WORDS = {
    "compute": "compute",
    "communication": "exposed communication",
    "transfers": "exposed transfers between host and device",
    "data": "waiting for data",
    "launch": "launch gaps",
    "idle": "idle time",
}
