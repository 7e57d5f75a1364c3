"""Why the other plans of a search lost; if none fits, what is missing and which changes would help."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text, listed, seconds_text
from fullshard.model.reduced_description import blocks_of
from fullshard.plan.plan import Plan
from fullshard.planner.estimate import WAIT_WORDS, Estimate, available, cores_share, disk_available, host_available
from fullshard.planner.memory.peak_memory import PeakMemory, predict
from fullshard.planner.search.best_first import fastest
from fullshard.planner.search.exact_estimates import FullModel
from fullshard.planner.search.labels import home_words
from fullshard.planner.search.offload_candidates import offloaded_candidates
from fullshard.planner.search.offload_levels import OffloadLevels
from fullshard.planner.search.pick import Best, pick
from fullshard.planner.search.plan_space import PlanRequest, precision_of
from fullshard.planner.search.strategy_cells import Cell
from fullshard.planner.strategies import choose

SAFE_ROOM = 0.88  # of memory: offloaded plans whose allocated bytes are below this always fit

Change = tuple[str, PlanRequest, Plan]  # in words; the changed request; its leanest plan


@dataclass(frozen=True)
class Alternative:
    """A plan that was not chosen, and why. `label`: its choices in a few words. `fix`: what to fix for it to be the answer."""

    label: str
    plan: Plan
    needed: int  # bytes
    step_seconds: float | None  # None if it does not fit
    reason: str
    fix: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shortage:
    """A plan that does not fit. `needed`: bytes of a device: allocated ones, and what the allocator is likely to add."""

    label: str
    plan: Plan
    peak: PeakMemory
    needed: int
    room: int


class NothingFitsError(FullshardError):
    """No plan fits. `shortages`: the leanest plan, and the same with everything that may leave the device on the host."""

    def __init__(self, message: str, shortages: tuple[Shortage, ...]):
        super().__init__(message)
        self.shortages = shortages


def alternatives(request: PlanRequest, best: Best, others: list[Best]) -> list[Alternative]:
    """The best plan of each other strategy and mesh, and why it lost: first those that fit, the fastest first."""
    return [_alternative(request, other, best) for other in others]


def _alternative(request: PlanRequest, other: Best, best: Best) -> Alternative:
    found, costs = other.result, best.result.estimate
    assert costs
    there = {f"home.{kind}": "device" for kind in ("params", "optimizer", "activations")}
    fix = {**there, **request.fix, "strategy": other.strategy.name, "tensor": found.plan.mesh.tensor, **other.strategy.choices}
    if found.estimate:
        reason = _why_slower(found.estimate, costs)
        return Alternative(other.label, found.plan, found.needed, found.seconds, reason, fix)
    reason = f"needs {bytes_text(found.needed)} of {bytes_text(costs.available)}"
    return Alternative(other.label, found.plan, found.needed, None, reason, fix)


def _why_slower(other: Estimate, best: Estimate) -> str:
    """By how much it is slower, and what it waits for longer than the best does."""
    slower = other.step_seconds / best.step_seconds - 1
    if slower < 0.005:
        return "as fast"
    more = {k: s - best.exposed.get(k, 0.0) for k, s in other.exposed.items() if k != "others"}
    cause, seconds = max(more.items(), key=lambda item: item[1], default=("", 0.0))
    if seconds > 0.3 * (other.step_seconds - best.step_seconds):
        return f"{slower:.1%} slower: {seconds_text(seconds)} more {WAIT_WORDS[cause]}"
    return f"{slower:.1%} slower: more to compute"


# -- nothing fits --------------------------------------------------------------------------------------------


def nothing_fits(request: PlanRequest, leanest: Best) -> NothingFitsError:
    """What the leanest plan lacks, and the smallest change that would do."""
    room = available(request.cluster, request.limit)
    larger, shorter = _more_devices(request), _shorter_sequences(request, leanest)
    ways = [
        _other_homes(request, leanest),
        _unpinned(request),
        _first_to_fit(larger, room),
        _first_to_fit(shorter, room),
    ]
    helps = f"{' or '.join(w for w in ways if w)} would fit"
    if not any(ways):
        ways = [_first_to_fit_offloaded(larger, room), _first_to_fit_offloaded(shorter, room)]
        there = "host memory or disk" if request.disk else "host memory"
        helps = f"{' or '.join(w for w in ways if w)} should fit with offload to {there}"
    if not any(ways):
        helps = "nothing small helps: take devices with more memory"
    found = _shortages(request, leanest, room)
    needs = [f"the leanest plan ({leanest.label}) needs {_needs(request, found[0])}"]
    needs += [f"with {s.label}, it needs {_needs(request, s)}" for s in found[1:]]
    return NothingFitsError(f"nothing fits: {'; '.join([*needs, helps])}", found)


def _shortages(request: PlanRequest, leanest: Best, room: int) -> tuple[Shortage, ...]:
    """The leanest plan as it is, and with everything that may leave the device on the host, if that needs less of the device."""
    fixed = "cpu_share" in request.fix
    offload = OffloadLevels.of(leanest.result.plan, request.description, request.fixed_homes, all_cores=not fixed)
    if not offload.top or request.fix.get("tensor", 1) > 1:
        return (_shortage(request, leanest.label, leanest.result.plan, room),)
    top = offload.at(offload.top)
    there = _shortage(request, leanest.label, leanest.result.plan, room)
    away = _shortage(request, home_words(top), top, room)
    return (there, away) if away.needed < there.needed else (there,)


def _shortage(request: PlanRequest, label: str, plan: Plan, room: int) -> Shortage:
    arguments = {"loss": request.loss, "optimizer": request.optimizer, "clip": request.clip, "engine": request.engine}
    arguments["cublas"] = request.cluster.device.kind == "cuda"
    request.check()
    share = cores_share(plan, request.cluster, request.optimizer)
    peak = predict(plan, request.description, **arguments, cpu_share=share, reserved=False)  # type: ignore[arg-type]
    return Shortage(label, plan, peak, peak.allocated, room)


def _needs(request: PlanRequest, s: Shortage) -> str:
    """Bytes of device, host and disk that a plan needs, of those that there are."""
    on_host, on_disk = sum(s.peak.host.values()), sum(s.peak.disk.values())
    there, most = host_available(request.cluster, s.needed), disk_available(request.cluster)
    shortage = max(0, on_host - there) if request.to_disk else 0
    parts = [f"{bytes_text(s.needed)} of the device's {bytes_text(s.room)}"]
    parts += [f"{bytes_text(on_host)} of the host's {bytes_text(there)}"] if on_host else []
    parts += [f"{bytes_text(on_disk)} of the disk's {bytes_text(most)}"] if on_disk else []
    parts += [f"at least {bytes_text(shortage)} of the disk's {bytes_text(most)}"] if shortage else []
    return listed(parts)


# -- changes that would help ---------------------------------------------------------------------------------


def _other_homes(request: PlanRequest, leanest: Best) -> str | None:
    """Homes with which the leanest plan fits, if the request fixes homes."""
    if not request.fixed_homes:
        return None
    free = replace(request, fix={k: v for k, v in request.fix.items() if not k.startswith("home.")})
    plan, full = leanest.result.plan, FullModel(free)
    found = fastest(free, full, [(leanest.strategy, Cell((plan,), partial(full.bound, plan), plain=True))])
    if found is None or found.result.estimate is None:
        return None
    return f"{home_words(found.result.plan)} ({bytes_text(found.result.estimate.host.allocated_bytes)} of the host)"


def _unpinned(request: PlanRequest) -> str | None:
    """A fixed choice without which something fits."""
    for name in ("remat", "micro_batch", "strategy"):
        if name in request.fix:
            free = replace(request, fix={k: v for k, v in request.fix.items() if k != name})
            best = pick(free).best
            if best.result.estimate:
                return f"another {name} than {request.fix[name]!r} ({best.label})"
    return None


def _more_devices(request: PlanRequest) -> list[Change]:
    """Twice as many devices, four times as many and so on, each with the leanest plan of all: nothing stays fixed."""
    found: list[Change] = []
    freed = " with no choice fixed" if request.fix else ""
    devices = request.cluster.devices
    while (devices := 2 * devices) <= 16384:
        more = replace(
            request, cluster=replace(request.cluster, devices=devices), global_batch=max(request.global_batch, devices), fix={}
        )
        plan = choose(
            "zero3",
            request.description,
            devices=devices,
            precision=precision_of(more),
            batch=request.batch(1),
            remat="full" if blocks_of(request.description) else "none",
        )
        found.append((f"{devices} devices{freed}", more, plan))
    return found


def _shorter_sequences(request: PlanRequest, leanest: Best) -> list[Change]:
    """Half the sequence, a quarter and so on; none if the model was traced for one shape only."""
    assert request.description.costs is not None
    if request.description.costs.shape is not None or request.description.costs.example is not None:
        return []
    found: list[Change] = []
    length = request.sequence
    while (length := length // 2) >= 256:
        plan = replace(leanest.result.plan, batch=replace(leanest.result.plan.batch, sequence=length))
        found.append((f"a sequence of {length}", request, plan))
    return found


def _first_to_fit(changes: list[Change], room: int) -> str | None:
    return next((words for words, request, plan in changes if _would_fit(request, plan, room)), None)


def _would_fit(request: PlanRequest, plan: Plan, room: int) -> bool:
    full = FullModel(request)
    return full.peak(plan).device <= room and full.judge(plan).estimate is not None


def _first_to_fit_offloaded(changes: list[Change], room: int) -> str | None:
    """The smallest change that fits with offload, by allocated bytes alone. Larger changes never need more memory."""
    at = bisect_left(changes, True, key=lambda change: _fits_offloaded(change[1], change[2], int(SAFE_ROOM * room)))
    return changes[at][0] if at < len(changes) else None


def _fits_offloaded(request: PlanRequest, plan: Plan, room: int) -> bool:
    for activations in (False, True) if request.disk and "activations" not in request.fixed_homes else (False,):
        request.check()
        asked = replace(request, disk_activations=activations, limit=room)
        if any(offloaded_candidates(asked, FullModel(asked), plan)):
            return True
    return False
