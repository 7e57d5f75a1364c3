"""Quick answers about plans from reduced models: the model with three and with five of its equal blocks.

Bytes and seconds grow evenly with the number of blocks, so two reduced models give those of the full one.
"""

from dataclasses import replace
from typing import Any

from fullshard.cluster.topology import Cluster
from fullshard.model.costs import evaluate
from fullshard.model.description import Description
from fullshard.model.reduced_description import blocks_of, reduced_description
from fullshard.plan.plan import Plan
from fullshard.planner.memory.peak_memory import peak_bytes, predict
from fullshard.planner.time.step_lanes import Timeline
from fullshard.planner.time.timeline import kernels_seconds, timeline

FEW, MORE = 3, 5  # blocks of the two reduced models
# The full model's allocator loses at least this share of what it loses with MORE blocks.
SLACK_SHARE = 0.8


class ReducedModel:
    """Bytes and seconds of plans, extrapolated from two reduced models to the full one. Answers are remembered."""

    def __init__(self, description: Description, cluster: Cluster, **arguments: Any):
        self.description, self.cluster, self.arguments = description, cluster, arguments
        # By identity: hashing a plan takes longer than asking twice.
        self.known: dict[int, tuple[Plan, tuple[int, dict[str, int]]]] = {}
        self.slacks: dict[int, tuple[Plan, int]] = {}
        self.times: dict[int, tuple[Plan, Timeline]] = {}
        self.kernels: dict[tuple[Any, ...], float] = {}
        self.models = [reduced_description(description, n) for n in (FEW, MORE)]
        few, more = (len(blocks_of(m)) for m in self.models)
        # How many times the difference between the two comes on top of the larger.
        self.steps = 0.0 if few == more else (len(blocks_of(description)) - more) / (more - few)

    def needed(self, plan: Plan) -> int:
        """Bytes allocated on the device at the peak."""
        return self._bytes(plan)[0]

    def host(self, plan: Plan) -> int:
        """Bytes of host memory."""
        return sum(self._bytes(plan)[1].values())

    def host_only(self, plan: Plan, to_disk: tuple[str, ...]) -> int:
        """Bytes of host memory that are not of a kind in `to_disk`, and so cannot go on to disk."""
        return sum(nbytes for term, nbytes in self._bytes(plan)[1].items() if term not in to_disk)

    def slack(self, plan: Plan) -> int:
        """Bytes that the allocator is likely to reserve beside what is allocated; 0 where there is no such allocator."""
        if id(plan) not in self.slacks:
            self.slacks[id(plan)] = (plan, int(SLACK_SHARE * self._fragmentation(plan)))
        return self.slacks[id(plan)][1]

    def reserved(self, plan: Plan) -> int:
        """Bytes that a plan is likely to need, with what the allocator adds."""
        return self.needed(plan) + self.slack(plan)

    def _fragmentation(self, plan: Plan) -> int:
        """Bytes reserved but not allocated with MORE blocks: more blocks seldom fragment memory less."""
        if self.cluster.device.kind != "cuda":
            return 0
        model = self.models[1]
        peak = predict(reduced_plan(_few_micro_batches(plan), model), model, **self.arguments)
        return 0 if peak.reserved is None else peak.reserved - peak.allocated

    def _bytes(self, plan: Plan) -> tuple[int, dict[str, int]]:
        if id(plan) not in self.known:
            self.known[id(plan)] = (plan, self._predicted(plan))
        return self.known[id(plan)][1]

    def _predicted(self, plan: Plan) -> tuple[int, dict[str, int]]:
        assert self.description.costs is not None
        shape = (plan.batch.micro_batch, plan.batch.sequence)
        inputs = sum(evaluate(size, *shape) for size in self.description.costs.inputs.values())
        left_out = inputs * max(0, plan.batch.accumulate - 2)  # of micro-batches that are left out
        short = _few_micro_batches(plan)
        few, more = (peak_bytes(reduced_plan(short, m), m, **self.arguments) for m in self.models)
        host = {term: self._extended(few.host.get(term, 0), nbytes) for term, nbytes in more.host.items()}
        return self._extended(few.device, more.device) + left_out, host

    def _extended(self, few: int, more: int) -> int:
        return int(more + self.steps * (more - few))

    def least_seconds(self, plan: Plan) -> float:
        """A lower bound of step time that holds for every strategy with this batch and remat: the kernels alone."""
        key = (plan.batch, plan.mesh.tensor, plan.precision, plan.compile, tuple(u.remat for u in plan.units))
        if key not in self.kernels:
            loss, engine = self.arguments["loss"], self.arguments.get("engine", "torch")
            few, more = (kernels_seconds(reduced_plan(plan, m), m, self.cluster, loss, engine) for m in self.models)
            self.kernels[key] = more + self.steps * (more - few)
        return self.kernels[key]

    def timeline(self, plan: Plan) -> Timeline:
        """Seconds of a step and what it waits for; lanes and kinds of compute are left out."""
        if id(plan) not in self.times:
            self.times[id(plan)] = (plan, self._timed(plan))
        return self.times[id(plan)][1]

    def _timed(self, plan: Plan) -> Timeline:
        few, more = (timeline(reduced_plan(plan, m), m, self.cluster, **self.arguments) for m in self.models)
        seconds = more.seconds + self.steps * (more.seconds - few.seconds)
        # Few blocks and many can have different bottlenecks: no step is shorter than the work of its busiest lane.
        busiest = max(busy + self.steps * (busy - few.busy.get(lane, 0.0)) for lane, busy in more.busy.items())
        extended = {k: more.exposed[k] + self.steps * (more.exposed[k] - few.exposed.get(k, 0.0)) for k in more.exposed}
        return Timeline(max(seconds, busiest), exposed=extended)


def _few_micro_batches(plan: Plan) -> Plan:
    """The plan with two micro-batches at most: the others have the same peak."""
    return replace(plan, batch=replace(plan.batch, accumulate=min(plan.batch.accumulate, 2)))


def reduced_plan(plan: Plan, model: Description) -> Plan:
    """The plan with the units of a reduced model only."""
    names = {u.name for u in model.units}
    if len(names) == len(plan.units):
        return plan
    return replace(plan, units=tuple(u for u in plan.units if u.name in names))
