"""Exact estimates of a search's plans, with all blocks of the model.

An estimate stops at the first thing that does not fit: allocated bytes and host memory, then what the allocator
reserves, then the seconds of a step.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fullshard.plan.plan import Plan
from fullshard.planner.estimate import Estimate, available, cores_share, estimate, host_available
from fullshard.planner.memory.peak_memory import PeakBytes, peak_bytes, predict
from fullshard.planner.search.plan_space import PlanRequest
from fullshard.planner.step.offload_bytes import OffloadBytes, slots_of
from fullshard.planner.step.unit_sizes import unit_sizes
from fullshard.planner.time.timeline import timeline


@dataclass(frozen=True)
class FullResult:
    """A plan and the bytes of a device that it needs. `estimate`: what it costs; None if it does not fit. `fits_host`: False
    if it needs too much host memory."""

    plan: Plan
    needed: int
    estimate: Estimate | None = None
    fits_host: bool = True


@dataclass(frozen=True)
class FullModel:
    """Answers about plans for the model of a request with all its blocks."""

    request: PlanRequest

    @cached_property
    def room(self) -> int:
        """Bytes of a device that a plan may reserve."""
        return available(self.request.cluster, self.request.limit)

    def peak(self, plan: Plan) -> PeakBytes:
        self.request.check()
        return peak_bytes(plan, self.request.description, **self._arguments(plan))

    def peak_after_move(self, plan: Plan, before: PeakBytes) -> PeakBytes:
        """The peak of a plan that differs from one with peak `before` only in what rests on disk."""
        if any(u.home.activations == "disk" for u in plan.units):
            return self.peak(plan)
        r = self.request
        share = cores_share(plan, r.cluster, r.optimizer)
        away = OffloadBytes(plan, unit_sizes(plan, r.description), slots_of(r.optimizer), clip=r.clip, cpu_share=share)
        staging = sum(away.staging())
        return PeakBytes(before.device + staging - before.staging, away.host(before.host.get("activations", 0)), staging)

    def seconds(self, plan: Plan) -> float:
        """Seconds of a step."""
        return timeline(plan, self.request.description, self.request.cluster, **self._arguments(plan)).seconds

    def host_shortage(self, peak: PeakBytes) -> int:
        """Bytes by which host memory is too small; negative if there is room."""
        return sum(peak.host.values()) - host_available(self.request.cluster, peak.device)

    def judge(self, plan: Plan, peak: PeakBytes | None = None, slack: int = 0) -> FullResult:
        """Estimate a plan if it fits. `peak`: if it is known; `slack`: bytes that the allocator is likely to add to it."""
        self.request.check()
        if peak is not None and (peak.device > self.room or self.host_shortage(peak) > 0):
            return FullResult(plan, peak.device + slack, fits_host=self.host_shortage(peak) <= 0)
        r, arguments = self.request, self._arguments(plan)
        on_cuda = r.cluster.device.kind == "cuda"
        predicted = predict(plan, r.description, **arguments, reserved=on_cuda, cublas=on_cuda)
        needed = predicted.allocated if predicted.reserved is None else predicted.reserved
        if needed > self.room:
            return FullResult(plan, needed)
        del arguments["cpu_share"]  # `estimate` finds it itself
        found = estimate(plan, r.description, r.cluster, **arguments, limit=r.limit, peak=predicted)
        return FullResult(plan, needed, found if found.fits else None, fits_host=found.fits)

    def _arguments(self, plan: Plan) -> dict[str, Any]:
        r = self.request
        share = cores_share(plan, r.cluster, r.optimizer)
        return {"loss": r.loss, "optimizer": r.optimizer, "clip": r.clip, "cpu_share": share, "engine": r.engine}
