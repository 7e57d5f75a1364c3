"""Plans of a search estimated whole, only as far as it takes to see that one does not fit: first what is allocated and
what the host holds, then what the allocator reserves, last the seconds of a step."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fullshard.plan import Plan
from fullshard.planner.estimate import Estimate, available, cores_share, estimate, host_available
from fullshard.planner.memory.peak import Level, highest, predict
from fullshard.planner.search.space import Wanted
from fullshard.planner.step.offload_bytes import OffloadBytes, slots_of
from fullshard.planner.step.unit_sizes import groups
from fullshard.planner.time.timeline import timeline


@dataclass(frozen=True)
class Tried:
    """A plan, the bytes of a device that it needs as far as was looked, and what it costs if it fits. `host`: whether it
    has room there."""

    plan: Plan
    needed: int
    found: Estimate | None = None
    host: bool = True


@dataclass(frozen=True)
class Whole:
    """What is wanted, for a model with all its blocks."""

    wanted: Wanted

    @cached_property
    def room(self) -> int:
        return available(self.wanted.cluster, self.wanted.limit)

    def level(self, plan: Plan) -> Level:
        return highest(plan, self.wanted.description, **self._common(plan))

    def moved(self, plan: Plan, level: Level) -> Level:
        """The level of a plan that differs from one of that level in what rests on disk."""
        if any(u.home.activations == "disk" for u in plan.units):
            return self.level(plan)
        w = self.wanted
        share = cores_share(plan, w.cluster, w.optimizer)
        away = OffloadBytes(plan, groups(plan, w.description), slots_of(w.optimizer), clip=w.clip, cpu_share=share)
        staging = sum(away.staging())
        return Level(level.device + staging - level.staging, away.host(level.host.get("activations", 0)), staging)

    def seconds(self, plan: Plan) -> float:
        """Of a step."""
        return timeline(plan, self.wanted.description, self.wanted.cluster, **self._common(plan)).seconds

    def lacking(self, level: Level) -> int:
        """Bytes that the host has too few."""
        return sum(level.host.values()) - host_available(self.wanted.cluster, level.device)

    def tried(self, plan: Plan, level: Level | None = None, slack: int = 0) -> Tried:
        """Whether a plan fits. `level`: if it is known; `slack`: what the allocator is likely to add to it."""
        if level is not None and (level.device > self.room or self.lacking(level) > 0):
            return Tried(plan, level.device + slack, host=self.lacking(level) <= 0)
        w, common = self.wanted, self._common(plan)
        peak = predict(plan, w.description, **common, reserved=w.cluster.device.kind == "cuda")
        needed = peak.allocated if peak.reserved is None else peak.reserved
        if needed > self.room:
            return Tried(plan, needed)
        del common["cpu_share"]  # which is estimate's to find
        found = estimate(plan, w.description, w.cluster, **common, limit=w.limit, peak=peak)
        return Tried(plan, needed, found if found.fits else None, host=found.fits)

    def _common(self, plan: Plan) -> dict[str, Any]:
        w = self.wanted
        share = cores_share(plan, w.cluster, w.optimizer)
        return {"loss": w.loss, "optimizer": w.optimizer, "clip": w.clip, "cpu_share": share}
