"""Models thinned to a few of their equal blocks: quick answers about plans, extended to the whole in proportion."""

from dataclasses import replace
from typing import Any

from fullshard.cluster.cluster import Cluster
from fullshard.model.costs import Costs, Trace
from fullshard.model.description import Description
from fullshard.plan import Plan
from fullshard.planner.memory.peak import highest, predict
from fullshard.planner.time.timeline import Timeline, kernels_seconds, timeline

FEW, MORE = 3, 5  # blocks of a thinned model
SURE = 0.8  # of what the allocator loses with a few blocks: it may be that much less with all of them


class Thin:
    """Quick answers about plans: from two thinned models, extended to the whole."""

    def __init__(self, description: Description, cluster: Cluster, **common: Any):
        self.description, self.cluster, self.common = description, cluster, common
        # By identity: hashing a plan takes longer than asking twice.
        self.known: dict[int, tuple[Plan, tuple[int, dict[str, int]]]] = {}
        self.lost: dict[int, tuple[Plan, int]] = {}
        self.times: dict[int, tuple[Plan, Timeline]] = {}
        self.kernels: dict[tuple[Any, ...], float] = {}
        self.models = [thinned(description, n) for n in (FEW, MORE)]
        counts = [len(blocks_of(m)) for m in self.models]
        self.step = 0.0 if counts[0] == counts[1] else (len(blocks_of(description)) - counts[1]) / (counts[1] - counts[0])

    def needed(self, plan: Plan) -> int:
        """Bytes allocated at the peak; for plans that cannot fit, what rests alone."""
        return self._bytes(plan)[0]

    def host(self, plan: Plan) -> int:
        """Bytes of the host."""
        return sum(self._bytes(plan)[1].values())

    def stuck(self, plan: Plan, onward: tuple[str, ...]) -> int:
        """Bytes of the host that cannot go on to disk, as `onward` can."""
        return sum(nbytes for term, nbytes in self._bytes(plan)[1].items() if term not in onward)

    def slack(self, plan: Plan) -> int:
        """Bytes that the allocator is likely to reserve beside what is allocated: nearly all of a thinned model's. What lies
        between the tensors of a few blocks is what is lost, and with more blocks it is seldom less."""
        if id(plan) not in self.lost:
            self.lost[id(plan)] = (plan, int(SURE * self._lost(plan)))
        return self.lost[id(plan)][1]

    def _lost(self, plan: Plan) -> int:
        if self.cluster.device.kind != "cuda":
            return 0
        model = self.models[1]
        peak = predict(thin_plan(_lean(plan), model), model, **self.common)
        assert peak.reserved is not None
        return peak.reserved - peak.allocated

    def _bytes(self, plan: Plan) -> tuple[int, dict[str, int]]:
        if id(plan) not in self.known:
            self.known[id(plan)] = (plan, self._predicted(plan))
        return self.known[id(plan)][1]

    def _predicted(self, plan: Plan) -> tuple[int, dict[str, int]]:
        ids = 16 * plan.batch.micro_batch * plan.batch.sequence * max(0, plan.batch.accumulate - 2)
        lean = _lean(plan)
        few, more = (highest(thin_plan(lean, m), m, **self.common) for m in self.models)
        host = {term: self._extended(few.host.get(term, 0), nbytes) for term, nbytes in more.host.items()}
        return self._extended(few.device, more.device) + ids, host

    def _extended(self, few: int, more: int) -> int:
        return int(more + self.step * (more - few))

    def least(self, plan: Plan) -> float:
        """Seconds that no step of this batch and remat is below, whatever its strategy: its kernels, one after the other."""
        key = (plan.batch, plan.mesh.tensor, plan.precision, plan.compile, tuple(u.remat for u in plan.units))
        if key not in self.kernels:
            few, more = (kernels_seconds(thin_plan(plan, m), m, self.cluster, self.common["loss"]) for m in self.models)
            self.kernels[key] = more + self.step * (more - few)
        return self.kernels[key]

    def timeline(self, plan: Plan) -> Timeline:
        if id(plan) not in self.times:
            self.times[id(plan)] = (plan, self._timed(plan))
        return self.times[id(plan)][1]

    def _timed(self, plan: Plan) -> Timeline:
        few, more = (timeline(thin_plan(plan, m), m, self.cluster, **self.common) for m in self.models)
        seconds = more.seconds + self.step * (more.seconds - few.seconds)
        # What bounds a few blocks need not bound many: no step is shorter than the busiest lane's work.
        busiest = max(busy + self.step * (busy - few.busy.get(lane, 0.0)) for lane, busy in more.busy.items())
        extended = {k: more.exposed[k] + self.step * (more.exposed[k] - few.exposed.get(k, 0.0)) for k in more.exposed}
        return Timeline(max(seconds, busiest), exposed=extended)


def _lean(plan: Plan) -> Plan:
    """With two micro-batches at most: the others are alike."""
    return replace(plan, batch=replace(plan.batch, accumulate=min(plan.batch.accumulate, 2)))


def thinned(description: Description, count: int) -> Description:
    """The model with only the first `count` of its blocks, if they are all alike."""
    blocks = blocks_of(description)
    assert description.costs is not None
    alike = {tuple((p.shape, p.dtype, p.trainable) for p in u.parameters) for u in description.units if u.kind == "block"}
    if len(blocks) <= count or len(alike) > 1:
        return description
    dropped = set(blocks[count:])
    units = tuple(u for u in description.units if u.name not in dropped)
    return replace(description, units=units, costs=_thin_costs(description.costs, dropped))


def _thin_costs(costs: Costs, dropped: set[str]) -> Costs:
    traces = {key: _without(trace, dropped) for key, trace in costs.traces.items()}
    return replace(costs, traces=traces, split={ranks: _thin_costs(c, dropped) for ranks, c in costs.split.items()})


def _without(trace: Trace, dropped: set[str]) -> Trace:
    kept = [i for i, (_, unit) in enumerate(trace.moments) if unit not in dropped]
    return Trace(tuple(trace.moments[i] for i in kept), trace.sections, tuple(trace.template[i] for i in kept))


def blocks_of(description: Description) -> list[str]:
    return [u.name for u in description.units if u.kind == "block"]


def thin_plan(plan: Plan, model: Description) -> Plan:
    names = {u.name for u in model.units}
    if len(names) == len(plan.units):
        return plan
    return replace(plan, units=tuple(u for u in plan.units if u.name in names))
