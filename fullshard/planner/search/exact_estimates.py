"""Exact answers about a search's plans. Each is found once.

An estimate stops at the first thing that does not fit: allocated bytes and host memory, then what the allocator
reserves, then the seconds of a step.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fullshard.plan.plan import Plan
from fullshard.planner.estimate import Estimate, available, cores_share, estimate, host_available
from fullshard.planner.memory.peak_memory import PeakBytes, peak_bytes, predict
from fullshard.planner.search.plan_space import PlanRequest
from fullshard.planner.step.few_blocks import COUNTS, few_blocks
from fullshard.planner.time.step_lanes import Timeline
from fullshard.planner.time.timeline import kernels_seconds, timeline

ROUNDING = 1e-9  # of a sum of many kernels
SLACK_SHARE = 0.8  # more blocks seldom fragment memory less than this


@dataclass(frozen=True)
class FullResult:
    """A plan and the bytes of a device that it needs. `estimate`: what it costs; None if it does not fit. `fits_host`: False
    if it needs too much host memory."""

    plan: Plan
    needed: int
    estimate: Estimate | None = None
    fits_host: bool = True

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite if the plan does not fit."""
        return self.estimate.step_seconds if self.estimate else float("inf")


@dataclass(frozen=True)
class FullModel:
    """Answers about plans for the model of a request with all its blocks."""

    request: PlanRequest
    # By identity: hashing a plan takes long.
    peaks: dict[int, tuple[Plan, PeakBytes]] = field(default_factory=dict, repr=False)
    times: dict[int, tuple[Plan, Timeline]] = field(default_factory=dict, repr=False)
    results: dict[int, FullResult] = field(default_factory=dict, repr=False)
    kernels: dict[tuple[Any, ...], float] = field(default_factory=dict, repr=False)

    @cached_property
    def room(self) -> int:
        """Bytes of a device that a plan may reserve."""
        return available(self.request.cluster, self.request.limit)

    def bound(self, plan: Plan) -> float:
        """A lower bound of step time that holds for every strategy with this batch and remat: the kernels alone."""
        r = self.request
        key = (plan.batch.micro_batch, plan.batch.accumulate, plan.mesh.tensor, plan.compile, tuple(u.remat for u in plan.units))
        if key not in self.kernels:
            self.kernels[key] = (1 - ROUNDING) * kernels_seconds(plan, r.description, r.cluster, r.loss, r.engine)
        return self.kernels[key]

    def seconds(self, plan: Plan) -> float:
        """Seconds of a step."""
        return self.time(plan).seconds

    def time(self, plan: Plan) -> Timeline:
        if id(plan) not in self.times:
            self.request.check()
            r = self.request
            self.times[id(plan)] = (plan, timeline(plan, r.description, r.cluster, **self._arguments(plan)))
        return self.times[id(plan)][1]

    def peak(self, plan: Plan) -> PeakBytes:
        if id(plan) not in self.peaks:
            self.request.check()
            self.peaks[id(plan)] = (plan, peak_bytes(plan, self.request.description, **self._arguments(plan)))
        return self.peaks[id(plan)][1]

    def fits(self, plan: Plan) -> bool:
        """True if the allocated bytes fit, on the device and on the host."""
        return self.peak(plan).device <= self.room and self.host_shortage(self.peak(plan)) <= 0

    def host_shortage(self, peak: PeakBytes) -> int:
        """Bytes by which host memory is too small; negative if there is room."""
        return sum(peak.host.values()) - host_available(self.request.cluster, peak.device)

    def slack(self, plan: Plan) -> int:
        """About what the allocator adds to a plan's allocated bytes: most of what it adds with a few of the blocks."""
        r, few = self.request, few_blocks(plan, self.request.description, COUNTS[0])
        if r.cluster.device.kind != "cuda" or few is None:
            return 0
        found = predict(few.plan, few.description, **self._arguments(plan), cublas=True)
        return 0 if found.reserved is None else int(SLACK_SHARE * (found.reserved - found.allocated))

    def judge(self, plan: Plan) -> FullResult:
        """Estimate a plan if it fits."""
        if id(plan) not in self.results:
            self.request.check()
            self.results[id(plan)] = self._judge(plan) if self.fits(plan) else self._too_large(plan)
        return self.results[id(plan)]

    def _too_large(self, plan: Plan) -> FullResult:
        peak = self.peak(plan)
        return FullResult(plan, peak.device, fits_host=self.host_shortage(peak) <= 0)

    def _judge(self, plan: Plan) -> FullResult:
        r, arguments = self.request, self._arguments(plan)
        on_cuda = r.cluster.device.kind == "cuda"
        predicted = predict(plan, r.description, **arguments, reserved=on_cuda, cublas=on_cuda)
        needed = predicted.allocated if predicted.reserved is None else predicted.reserved
        if needed > self.room:
            return FullResult(plan, needed)
        del arguments["cpu_share"]  # `estimate` finds it itself
        common: dict[str, Any] = {"limit": r.limit, "peak": predicted, "time": self.time(plan)}
        found = estimate(plan, r.description, r.cluster, **arguments, **common)
        return FullResult(plan, needed, found if found.fits else None, fits_host=found.fits)

    def _arguments(self, plan: Plan) -> dict[str, Any]:
        r = self.request
        share = cores_share(plan, r.cluster, r.optimizer)
        return {"loss": r.loss, "optimizer": r.optimizer, "clip": r.clip, "cpu_share": share, "engine": r.engine}
