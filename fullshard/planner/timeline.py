"""The seconds of a step: its operations laid onto lanes, each waiting for what it needs.

The host issues everything in the schedule's order. The device computes on one lane while gathers, reductions and
the all-reduces of copies run on lanes of their own; those that cross the same links share them. What compute
waited for is what a plan exposes.
"""

import math
from dataclasses import dataclass, field

from fullshard.cluster import Cluster
from fullshard.costs import Moment
from fullshard.description import Description
from fullshard.optimizer import SGD, AdamW, Optimizer
from fullshard.plan import Plan
from fullshard.planner.groups import Group, groups, item
from fullshard.planner.links import axis, collective_seconds, spread_of
from fullshard.planner.schedule import Operation, schedule
from fullshard.planner.work import Machine, Work

BACKWARD: tuple[Moment | str, ...] = ("backward", "done", "end")
# The host's time in units of one bare launch: a kernel of a model comes with its module and autograd's part; a unit's
# door with FSDP's hooks; every parameter with the optimizer's and the norm's bookkeeping.
KERNEL, DOOR, TENSOR = 4.4, 125.0, 13.0
# Ranks differ from each other by chance, a step waits for the last of them, and the more there are the later that is.
# A spread of this share of a step puts the published losses of weak scaling where they are up to 128 devices.
SPREAD = 0.015
CONCATENATE = 0.45  # of a copy's rate: gradients are gathered into one buffer and widened on the way


@dataclass
class Timeline:
    """`busy`: seconds of each lane. `exposed`: what compute waited for. `compute`: seconds by kind of work."""

    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    compute: dict[str, float] = field(default_factory=dict)


def timeline(
    plan: Plan,
    description: Description,
    cluster: Cluster,
    *,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    spread: float = SPREAD,
) -> Timeline:
    """One step of `plan` on `cluster`. Micro-batches between the second and the last are alike: one stands for them."""
    last = plan.batch.accumulate - 1
    shown = tuple(sorted({0, min(1, last), last}))
    lanes = _Lanes(plan, description, cluster, optimizer or AdamW())
    for operation in schedule(plan, description, loss=loss, micros=shown):
        lanes.run(operation)
    return lanes.finish(repeats=plan.batch.accumulate - len(shown), spread=spread)


class _Lanes:
    """When each lane is free, while operations are laid onto them."""

    def __init__(self, plan: Plan, description: Description, cluster: Cluster, optimizer: Optimizer):
        self.plan, self.cluster, self.optimizer = plan, cluster, optimizer
        self.groups = groups(plan, description)
        precision = plan.precision
        self.machine = Machine(cluster, precision.compute, compiled=plan.compile)
        self.compute, self.reduce_item, self.master = item(precision.compute), item(precision.reduce), item(precision.master)
        self.free = dict.fromkeys(("compute", "gather", "reduce", "copies"), 0.0)
        self.links = {"node": 0.0, "network": 0.0}
        self.host = 0.0
        self.unpacked = 0.0  # when the last gather was copied out: the next may only start then
        self.ready: dict[str, float] = {}  # when a unit's gather has arrived
        self.reduced: dict[str, float] = {}  # when a unit's reduction is done
        self.starts: list[float] = []  # of micro-batches
        self.found = Timeline(busy=dict.fromkeys(("compute", "gather", "reduce", "copies", "host"), 0.0))

    def run(self, op: Operation) -> None:
        getattr(self, f"_{op.kind}", self._nothing)(op)

    def finish(self, repeats: int, spread: float) -> Timeline:
        end = max(*self.free.values(), self.host)
        if repeats > 0:  # the second micro-batch, so many times more
            share = self.starts[2] - self.starts[1]
            end += repeats * share
            self._stretch(1 + repeats * share / (end - repeats * share))
        late = end * spread * math.sqrt(2 * math.log(self.plan.mesh.devices))
        self._expose("others", late)
        self.found.seconds = end + late
        return self.found

    def _stretch(self, factor: float) -> None:
        for table in (self.found.busy, self.found.exposed, self.found.compute):
            for key in table:
                table[key] *= factor

    # -- lanes ---------------------------------------------------------------------------------------

    def _nothing(self, op: Operation) -> None:
        """Frees take no time."""

    def _issue(self, kernels: float) -> None:
        self.host += kernels * KERNEL * self.machine.launch
        self.found.busy["host"] += kernels * KERNEL * self.machine.launch

    def _on_compute(self, seconds: float, kind: str, kernels: float = 1.0) -> None:
        """Work on the compute lane; it cannot end before the host has issued its last kernel."""
        before = self.host
        self._issue(kernels)
        start = max(self.free["compute"], before)
        end = max(start + seconds, self.host)
        self._expose("host", end - seconds - self.free["compute"])
        self.free["compute"] = end
        self.found.busy["compute"] += seconds
        self.found.compute[kind] = self.found.compute.get(kind, 0.0) + seconds

    def _wait(self, until: float, cause: str) -> None:
        self._expose(cause, until - self.free["compute"])
        self.free["compute"] = max(self.free["compute"], until)

    def _expose(self, cause: str, seconds: float) -> None:
        if seconds > 0:
            self.found.exposed[cause] = self.found.exposed.get(cause, 0.0) + seconds

    def _collective(self, lane: str, kind: str, nbytes: int, ranks: int, stride: int, earliest: float) -> float:
        """When a collective ends that may start at `earliest`."""
        seconds = collective_seconds(kind, nbytes, ranks, self.cluster, stride=stride)  # type: ignore[arg-type]
        link = "network" if spread_of(ranks, stride, self.cluster).nodes > 1 else "node"
        start = max(self.free[lane], self.links[link], earliest, self.host)
        self.free[lane] = self.links[link] = start + seconds
        self.found.busy[lane] += seconds
        return start + seconds

    # -- operations ----------------------------------------------------------------------------------

    def _compute(self, op: Operation) -> None:
        assert op.section is not None
        if op.moment == "start":
            self.starts.append(self.free["compute"])
        backward = op.moment in BACKWARD
        shape = (1, op.tokens) if op.moment == "chunk" else (self.plan.batch.micro_batch, self.plan.batch.sequence)
        self._lay(self.machine.section(op.section, *shape, backward=backward))

    def _lay(self, work: Work) -> None:
        if not work.kernels:
            return
        for kind in ("gemm", "attention", "pointwise"):
            if (seconds := getattr(work, kind)) > 0:
                self._on_compute(seconds, kind, work.kernels * seconds / work.seconds)

    def _gather(self, op: Operation) -> None:
        group = self.groups[op.unit]
        stride = axis(self.plan.mesh, "shard")[1]
        cast = self.machine.copy(sum(group.shards) * (self.master + self.compute))
        end = self._collective("gather", "all_gather", op.nbytes, op.ranks, stride, self.unpacked + cast)
        self.ready[op.unit] = end

    def _unpack(self, op: Operation) -> None:
        group = self.groups[op.unit]
        self._wait(self.ready.pop(op.unit, 0.0), "gather")
        elements = sum(group.whole)
        read = self.compute if group.world > 1 else self.master
        self._on_compute(self.machine.copy(elements * (read + self.compute)), "copies", DOOR / KERNEL)
        self.unpacked = self.free["compute"]

    def _accumulate(self, op: Operation) -> None:
        elements = self._trained(self.groups[op.unit])
        self._on_compute(self.machine.copy(elements * (self.compute + 2 * self.reduce_item)), "copies")

    def _reduce(self, op: Operation) -> None:
        group = self.groups[op.unit]
        elements = self._trained(group)
        widen = self.machine.copy(elements * (self.compute + self.reduce_item)) / CONCATENATE
        self._on_compute(widen, "copies", DOOR / KERNEL)
        self.reduced[op.unit] = self.free["compute"]
        if op.ranks > 1:
            stride = axis(self.plan.mesh, "shard")[1]
            done = self._collective("reduce", "reduce_scatter", op.nbytes, op.ranks, stride, self.free["compute"])
            self.reduced[op.unit] = done

    def _all_reduce(self, op: Operation) -> None:
        if op.unit:
            whole = self.groups[op.unit].world == 1
            stride = axis(self.plan.mesh, "data" if whole else "replicate")[1]
            done = self._collective("copies", "all_reduce", op.nbytes, op.ranks, stride, self.reduced[op.unit])
            if whole:
                self.reduced[op.unit] = done
        elif op.ranks > 1:
            self._on_compute(collective_seconds("all_reduce", op.nbytes, op.ranks, self.cluster), "agree")

    def _drain(self, op: Operation) -> None:
        self._wait(self.reduced.get(op.unit, 0.0), "reduce")

    def _norm(self, op: Operation) -> None:
        self._wait(max(self.free["reduce"], *self.reduced.values(), 0.0), "reduce")
        self._wait(self.free["copies"], "copies")
        self._on_compute(self.machine.copy(self._shards() * self.master), "norm", TENSOR / 2 / KERNEL * self._tensors())

    def _update(self, op: Operation) -> None:
        clip = self.machine.copy(self._shards() * 2 * self.master)
        slots = (1 if self.optimizer.momentum else 0) if isinstance(self.optimizer, SGD) else 2
        moved = self._shards() * self.master * (3 + 2 * slots)  # parameter and state in and out, gradient in
        self._on_compute(self.machine.copy(moved) + clip, "update", TENSOR / 2 / KERNEL * self._tensors())

    def _trained(self, group: Group) -> int:
        """Elements of whole gradients."""
        return sum(group.whole[i] for i in group.trained)

    def _shards(self) -> int:
        """Elements of this rank's trained shards."""
        return sum(g.shards[i] for g in self.groups.values() for i in g.trained)

    def _tensors(self) -> int:
        return sum(len(g.trained) for g in self.groups.values())
