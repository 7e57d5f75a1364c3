"""The seconds of a step: its operations laid onto lanes, each waiting for what it needs.

The host issues everything in the schedule's order. The device computes on one lane while gathers, reductions and
the all-reduces of copies run on lanes of their own; those that cross the same links share them. What compute
waited for is what a plan exposes. Transfers to host and disk, and the updates of what rests there, have lanes of
their own (`transfers`) and go on from one step into the next.
A CPU is its own host, and its collectives return when they are done: there everything happens one after the other.
"""

import math
from dataclasses import dataclass, field

from fullshard.cluster.cluster import Cluster
from fullshard.model.costs import Moment
from fullshard.model.description import Description
from fullshard.optimizer import AdamW, Optimizer
from fullshard.plan import Plan
from fullshard.planner.step.offload_bytes import OffloadBytes, WaitingGradients, slots_of
from fullshard.planner.step.phases import is_compiled, moments
from fullshard.planner.step.schedule import Operation, chunks, costs_of, schedule
from fullshard.planner.step.unit_sizes import Group, groups, item
from fullshard.planner.time.collectives import axis, collective_seconds, spread_of
from fullshard.planner.time.offload_lanes import Transfers, balance
from fullshard.planner.time.roofline import Machine, Work

LANES = ("compute", "gather", "reduce", "copies", "tensor")
BACKWARD: tuple[Moment | str, ...] = ("backward", "done", "end")
# Ranks differ from each other by chance, a step waits for the last of them, and the more there are the later that is.
# A spread of this share of a step puts the published losses of weak scaling where they are up to 128 devices.
SPREAD = 0.015
# While a collective runs, its kernels hold some of the device's cores, and compute beside it takes so much longer. With it
# the published losses from 8 to 512 devices come out, where collectives grow by a hop for every rank.
CROWDING = 0.4
TRIFLE = 1e-9  # seconds: what subtractions leave
QUIET = 0.97  # of its mean pace on a quiet core: such a host is its own
STEPS = 3  # until what is left over from one step to the next is the same each time


@dataclass(frozen=True)
class Hooks:
    """The host's time beside a model's operations, in units of one: at a unit's door, which does less where gradients are only
    added up, and for a rank alone; for every parameter at each door, and once more for its norm and its update; for a step,
    what moves its batch and reads its numbers; and at a compiled block, forward and backward each, its guards."""

    door: float
    adding: float
    alone: float
    tensor: float
    step: float
    compiled: float


# Streams and events among them. From how long the hosts of three H200s took to issue 25 steps, on quiet cores; so is `paces.ROW`.
ON_GPU = Hooks(50.0, 36.0, 42.0, 1.4, 193.0, 11.0)
ON_CPU = Hooks(37.0, 27.0, 25.0, 2.3, 150.0, 0.0)


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
    clip: bool = True,
    cpu_share: float | None = None,
) -> Timeline:
    """One step of `plan` on `cluster`. Micro-batches between the second and the last are alike: one stands for them.

    `clip`: whether updates wait for the gradient norm; `cpu_share`: of the pieces that the host's cores update, by
    default what the cluster's rates balance.

    The cores of a shared host are not alike from one step to the next. A step that device and host bound equally takes as long
    as the slower of the two each time, which is longer than at the host's mean pace: so the mean of three paces is told, a
    quiet core's, the mean, and one as far on its other side.
    """
    last = plan.batch.accumulate - 1
    shown = tuple(sorted({0, min(1, last), last}))
    slots = slots_of(optimizer or AdamW())
    share = balance(cluster, plan, slots) if cpu_share is None else cpu_share
    held = groups(plan, description)
    away = OffloadBytes(plan, held, slots, clip=clip, cpu_share=share)
    operations = schedule(plan, description, loss=loss, micros=shown, clip=clip)
    quiet = cluster.of("quiet")
    hosts = [cluster] if quiet > QUIET else [cluster.with_host(pace) for pace in (quiet, 1.0, 2 - quiet)]
    steps = []
    for host in hosts:
        lanes = _Lanes(plan, held, host, away)
        for _ in range(STEPS if away else 1):
            lanes.begin()
            for operation in operations:
                lanes.run(operation)
        steps.append(lanes.finish(repeats=plan.batch.accumulate - len(shown), spread=spread))
    return _mean(steps)


def _mean(steps: list[Timeline]) -> Timeline:
    def mean(table: str) -> dict[str, float]:
        keys = dict.fromkeys(key for step in steps for key in getattr(step, table))
        return {key: sum(getattr(step, table).get(key, 0.0) for step in steps) / len(steps) for key in keys}

    seconds = sum(step.seconds for step in steps) / len(steps)
    return Timeline(seconds, busy=mean("busy"), exposed=mean("exposed"), compute=mean("compute"))


def kernels_seconds(plan: Plan, description: Description, cluster: Cluster, loss: str) -> float:
    """What a step's own kernels keep the device busy for, at least: whatever the strategy."""
    costs, batch, found = costs_of(plan, description, loss), plan.batch, 0.0
    machine = Machine(cluster, plan.precision.compute, tensor=plan.mesh.tensor)
    for moment, _, section in moments(plan, costs, loss):
        shapes = [(batch.micro_batch, batch.sequence)]
        if moment == "chunk":
            shapes = [(1, tokens) for tokens in chunks(costs.vocabulary, batch.micro_batch * batch.sequence)]
        how = {"backward": moment in BACKWARD, "chunk": moment == "chunk"}
        found += sum(machine.section(section, *shape, **how).seconds for shape in shapes)
    return batch.accumulate * found


class _Lanes:
    """When each lane is free, while operations are laid onto them."""

    def __init__(self, plan: Plan, held: dict[str, Group], cluster: Cluster, away: OffloadBytes):
        self.plan, self.cluster, self.groups, self.away = plan, cluster, held, away
        self.transfers = Transfers(cluster, away)
        self.updated: dict[str, float] = {}  # when a unit's update is done
        self.put_off: dict[str, float] = {}  # units whose update is not laid yet, and when it may begin
        self.waiting = WaitingGradients(away)  # units whose gradients the lanes have still to read
        self.arrived: dict[str, float] = {}  # when a unit's shard is on the device
        self.returned: dict[str, float] = {}  # when its activations are
        self.spilled: dict[str, float] = {}  # when its activations are on the host
        self.filed: dict[str, float] = {}  # when they are on disk, or back from there on the host
        self.mark = 0.0  # when the step began
        precision = plan.precision
        self.machine = Machine(cluster, precision.compute, tensor=plan.mesh.tensor)
        self.compute, self.reduce_item, self.master = item(precision.compute), item(precision.reduce), item(precision.master)
        self.free = dict.fromkeys(LANES, 0.0)
        self.links = {"node": 0.0, "network": 0.0}
        self.host = 0.0
        self.crowded = 0.0  # seconds that compute will take longer for the collectives beside it
        self.serial = cluster.device.kind == "cpu"
        self.hooks = ON_CPU if self.serial else ON_GPU
        self.compiled = {u.name for u in plan.units if is_compiled(plan, u)}
        self.unpacked = 0.0  # when the last gather was copied out: the next may only start then
        self.ready: dict[str, float] = {}  # when a unit's gather has arrived
        self.summed: set[str] = set()  # units whose gradients are kept, wider than they came
        self.reduced: dict[str, float] = {}  # when a unit's reduction is done
        self.starts: list[tuple[float, Timeline]] = []  # of micro-batches: when, and what was found until then
        self.found = Timeline()

    def begin(self) -> None:
        """Another step, of which alone the result will tell."""
        self._lay_updates()
        self.mark = max(*self.free.values(), self.host)
        self.crowded = 0.0
        self.starts.clear()
        self.found = Timeline(busy=dict.fromkeys((*LANES, "host"), 0.0))
        self.transfers.busy = self.found.busy
        self.transfers.began, self.transfers.filed = -1.0, 0
        self.waiting.units.clear()

    def run(self, op: Operation) -> None:
        getattr(self, f"_{op.kind}", self._nothing)(op)

    def finish(self, repeats: int, spread: float) -> Timeline:
        self._lay_updates()
        end = max(*self.free.values(), self.host) - self.mark
        if repeats > 0:  # the second micro-batch, so many times more
            (second, before), (third, after) = self.starts[1:3]
            end += repeats * (third - second)
            self._repeat(repeats, before, after)
        late = end * spread * math.sqrt(2 * math.log(self.plan.mesh.devices))
        self._expose("others", late)
        self.found.seconds = end + late
        return self.found

    def _repeat(self, times: int, before: Timeline, after: Timeline) -> None:
        """What was found between the two, so many times more."""
        for table in ("busy", "exposed", "compute"):
            mine, old = getattr(self.found, table), getattr(before, table)
            for key, seconds in getattr(after, table).items():
                mine[key] += times * (seconds - old.get(key, 0.0))

    # -- lanes ---------------------------------------------------------------------------------------

    def _nothing(self, op: Operation) -> None:
        """Frees take no time."""

    def _issue(self, kernels: float) -> None:
        self.host += kernels * self.machine.issued
        self.found.busy["host"] += kernels * self.machine.issued

    def _on_compute(self, seconds: float, kind: str, kernels: float = 1.0) -> None:
        """Work on the compute lane; it cannot end before the host has issued its last kernel."""
        before = self.host
        self._issue(kernels)
        start = max(self.free["compute"], self.host if self.serial else before)
        longer = min(self.crowded, CROWDING * seconds)
        self.crowded -= longer
        self._expose("crowding", longer)
        end = max(start + seconds + longer, self.host)
        self.host = end if self.serial else self.host
        self._expose("host", end - seconds - longer - self.free["compute"])
        self.free["compute"] = end
        self.found.busy["compute"] += seconds
        self.found.compute[kind] = self.found.compute.get(kind, 0.0) + seconds

    def _wait(self, until: float, cause: str) -> None:
        self._expose(cause, until - self.free["compute"])
        self.free["compute"] = max(self.free["compute"], until)

    def _expose(self, cause: str, seconds: float) -> None:
        if seconds > TRIFLE:
            self.found.exposed[cause] = self.found.exposed.get(cause, 0.0) + seconds

    def _collective(self, lane: str, kind: str, nbytes: int, ranks: int, stride: int, earliest: float) -> float:
        """When a collective ends that may start at `earliest`."""
        seconds = collective_seconds(kind, nbytes, ranks, self.cluster, stride=stride)  # type: ignore[arg-type]
        link = "network" if spread_of(ranks, stride, self.cluster).nodes > 1 else "node"
        start = max(self.free[lane], self.links[link], earliest, self.host)
        self.free[lane] = self.links[link] = start + seconds
        self.found.busy[lane] += seconds
        if self.serial:
            self._wait(start + seconds, lane)
            self.host = start + seconds
        else:
            self.crowded += CROWDING * seconds
        return start + seconds

    # -- operations ----------------------------------------------------------------------------------

    def _compute(self, op: Operation) -> None:
        assert op.section is not None
        if op.moment == "start":
            so_far = self.found
            copied = Timeline(busy=dict(so_far.busy), exposed=dict(so_far.exposed), compute=dict(so_far.compute))
            self.starts.append((self.free["compute"], copied))
        backward = op.moment in BACKWARD
        if backward and self.transfers.began < 0 and (self.away.late or op.micro == self.plan.batch.accumulate - 1):
            self.transfers.began = self.free["compute"]
        shape = (1, op.tokens) if op.moment == "chunk" else (self.plan.batch.micro_batch, self.plan.batch.sequence)
        if op.unit in self.compiled and op.moment in ("forward", "backward"):
            self._issue(self.hooks.compiled)
        self._lay(self.machine.section(op.section, *shape, backward=backward, chunk=op.moment == "chunk"))

    def _lay(self, work: Work) -> None:
        if not work.kernels:
            return
        kernels = work.kernels + work.python / self.machine.issued  # their worth of the host's time
        for kind in ("gemm", "attention", "pointwise"):
            if (seconds := getattr(work, kind)) > 0:
                self._on_compute(seconds, kind, kernels * seconds / work.seconds)
        if work.tensor:
            self._tensor(work.tensor)

    def _tensor(self, seconds: float) -> None:
        """Collectives of the tensor axis: the next kernel needs what they leave."""
        link = "network" if spread_of(self.plan.mesh.tensor, 1, self.cluster).nodes > 1 else "node"
        start = max(self.free["compute"], self.links[link], self.host)
        self.free["tensor"] = self.links[link] = start + seconds
        self.found.busy["tensor"] += seconds
        self._wait(start + seconds, "tensor")
        if self.serial:
            self.host = start + seconds

    def _gather(self, op: Operation) -> None:
        group = self.groups[op.unit]
        stride = axis(self.plan.mesh, "shard")[1]
        cast = 0.0 if group.away else self.machine.copy(sum(group.shards) * (self.master + self.compute))
        if self.serial:
            self._on_compute(cast, "copies")
        there = max(self.updated.get(op.unit, 0.0), self.arrived.get(op.unit, 0.0))
        end = self._collective("gather", "all_gather", op.nbytes, op.ranks, stride, max(self.unpacked + cast, there))
        self.ready[op.unit] = end

    def _unpack(self, op: Operation) -> None:
        group = self.groups[op.unit]
        updated = self.updated.pop(op.unit, 0.0)
        self.host = max(self.host, updated)  # which learns from the cores when they are done
        self._wait(updated, "update")
        self._wait(self.arrived.pop(op.unit, 0.0), "fetch")
        self._wait(self.ready.pop(op.unit, 0.0), "gather")
        elements = sum(group.whole)
        read = self.compute if group.world > 1 or group.away else self.master
        door = self._door(group, group.whole)
        self._on_compute(self.machine.copy(elements * (read + self.compute)), "copies", door)
        self.unpacked = self.free["compute"]

    def _accumulate(self, op: Operation) -> None:
        """The first gradient is widened if the sum is wider, the others are added."""
        group = self.groups[op.unit]
        elements = self._trained(group)
        if not op.first:
            seconds = self.machine.add(elements * (self.compute + 2 * self.reduce_item))
        elif self.compute != self.reduce_item:
            seconds = self.machine.join(elements, self.compute, self.reduce_item)
            self.summed.add(op.unit)
        else:
            seconds = 0.0
        reduces = op.micro == self.plan.batch.accumulate - 1  # in the same hooks
        self._on_compute(seconds, "copies", 1.0 if reduces else self._door(group, group.trained, adding=True))

    def _reduce(self, op: Operation) -> None:
        group = self.groups[op.unit]
        read = self.reduce_item if op.unit in self.summed else self.compute
        self.summed.discard(op.unit)
        joined = self.machine.join(self._trained(group), read, self.reduce_item)
        self._on_compute(joined, "copies", self._door(group, group.trained))
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
        nbytes = sum(g.moving * (self.away.gradient if g.away else self.master) for g in self.groups.values())
        self._on_compute(self.machine.sweep_list(nbytes), "norm", self.hooks.step + self.hooks.tensor / 2 * self._tensors())

    def _update(self, op: Operation) -> None:
        if op.unit:
            self._update_away(self.groups[op.unit])
        else:
            self._update_resident([g for g in self.groups.values() if not g.away], clip=self.away.clip)

    def _update_resident(self, resident: list[Group], *, clip: bool) -> None:
        elements = sum(g.moving for g in resident)
        tensors = sum(len(g.trained) for g in resident)
        clipped = self.machine.sweep_list(elements * 2 * self.master) if clip else 0.0
        moved = elements * self.master * (3 + 2 * self.away.slots)  # parameter and state in and out, gradient in
        self._on_compute(self.machine.update(moved) + clipped, "update", self.hooks.tensor / 2 * tensors)

    # -- what rests away -----------------------------------------------------------------------------

    def _update_away(self, group: Group) -> None:
        """Queued: after the norm, or as soon as the unit's gradient is there."""
        ready = self.free["compute"] if self.away.late else max(self.reduced[group.name], self._copied(group))
        if group.home.optimizer == "device":  # its shard alone is elsewhere
            self._update_resident([group], clip=False)
            nbytes = group.moving * self.compute
            self.updated[group.name] = self.transfers.spill(nbytes, self.free["compute"])
        elif self.transfers.gpu and self.away.by_need:
            self.put_off[group.name] = ready
        elif self.transfers.gpu:
            self.updated[group.name] = self.transfers.update(group.name, ready)
        else:
            self._on_compute(group.moving * self.transfers.core, "update")
            self.updated[group.name] = self._on_files(group)
        for gone in self.waiting.add(group.name) if self.away.backlog else ():
            read = self.transfers.taken.get(gone, 0.0)
            self.host = max(self.host, read)
            self._wait(read, "update")

    def _lay_updates(self) -> None:
        """In the order of forward: each takes its time from when its gradient was there, and those after it what is left."""
        for name in (n for n in self.groups if n in self.put_off):
            self.updated[name] = self.transfers.update(name, self.put_off[name])
        self.put_off.clear()

    def _copied(self, group: Group) -> float:
        return self.free["copies"] if group.copies > 1 else 0.0

    def _on_files(self, group: Group) -> float:
        """When a CPU's update, whose state passed through memory, is done and new shards are where they rest."""
        done = self.free["compute"]
        if group.home.optimizer == "disk":
            nbytes = group.moving * self.away.state
            done = max(done, self.transfers.lay("disk", self.transfers.began, nbytes / self.transfers.read))
            self.transfers.lay("disk", done, nbytes / self.transfers.write)
        if group.home.params == "disk":
            done = self.transfers.lay("disk", done, group.moving * self.compute / self.transfers.write)
        return done

    def _fetch(self, op: Operation) -> None:
        """One unit ahead. A shard: after the last gather was copied out, and after the unit's own update."""
        if op.what == "activations" and op.unit in self.filed:
            self.filed[op.unit] = self.transfers.read_back(op.nbytes, max(self.free["compute"], self.filed[op.unit]))
            return
        if op.what == "activations":
            self.returned[op.unit] = self.transfers.fetch(op.nbytes, self.free["compute"])
            return
        updated = self.updated.get(op.unit, 0.0)
        if self.groups[op.unit].home.params == "disk":
            self.arrived[op.unit] = self.transfers.fetch_filed(op.nbytes, self.unpacked, updated)
        else:
            self.arrived[op.unit] = self.transfers.fetch(op.nbytes, max(self.unpacked, updated))

    def _spill(self, op: Operation) -> None:
        if op.what == "gradients":
            group = self.groups[op.unit]
            self.transfers.drain(op.unit, max(self.reduced[op.unit], self._copied(group)))
        elif self.groups[op.unit].home.activations == "disk":
            self.spilled[op.unit], self.filed[op.unit] = self.transfers.spill_filed(op.nbytes, self.free["compute"])
        else:
            self.spilled[op.unit] = self.transfers.spill(op.nbytes, self.free["compute"])

    def _forget(self, op: Operation) -> None:
        """Memory is given to others when it has been copied."""
        if op.what == "activations":
            self._wait(self.spilled.pop(op.unit), "spill")

    def _await(self, op: Operation) -> None:
        """Updates are waited for where a unit is gathered and unpacked."""
        if op.what == "activations" and op.unit in self.filed:  # from the disk, which the host waits for
            self.host = max(self.host, self.filed.pop(op.unit))
            self.returned[op.unit] = self.transfers.fetch(op.nbytes, max(self.host, self.free["compute"]))
        if op.what == "activations":
            self._wait(self.returned.pop(op.unit), "fetch")

    def _door(self, group: Group, passing: tuple[int, ...], *, adding: bool = False) -> float:
        """Operations' worth of the host's time at a unit's door, and of the parameters that pass it."""
        door = self.hooks.alone if group.world == 1 else self.hooks.adding if adding else self.hooks.door
        return door + self.hooks.tensor * len(passing)

    def _trained(self, group: Group) -> int:
        """Elements of whole gradients."""
        return sum(group.whole[i] for i in group.trained)

    def _tensors(self) -> int:
        return sum(len(g.trained) for g in self.groups.values())
