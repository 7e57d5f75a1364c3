"""The operations of a step laid onto lanes: when each lane is free, and what compute waited for.

Lanes are compute, gathers, reductions, all-reduces between copies, and collectives of the tensor or expert axis. Offload has
lanes of its own (`offload_lanes`), which go on from one step into the next.
"""

import math
from dataclasses import dataclass, field
from typing import get_args

from fullshard.cluster.topology import Cluster
from fullshard.plan.plan import Plan
from fullshard.planner.step.offload_bytes import OffloadBytes, WaitingGradients
from fullshard.planner.step.phases import BACKWARD, is_compiled
from fullshard.planner.step.quantized_wire import Quantization
from fullshard.planner.step.schedule import Operation, OperationKind
from fullshard.planner.step.unit_bytes import UnitBytes
from fullshard.planner.step.unit_sizes import UnitSizes
from fullshard.planner.time.collectives import axis, collective_seconds, spread_of
from fullshard.planner.time.offload_lanes import Transfers
from fullshard.planner.time.roofline import Machine, SectionTime

LANES = ("compute", "gather", "reduce", "copies", "tensor", "experts")
ROUNDING = 1e-9  # seconds: shorter waits are rounding errors of subtractions


@dataclass
class Timeline:
    """Seconds of a step. `busy`: by lane. `exposed`: what compute waited for, by cause. `compute`: by kind of work."""

    seconds: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    compute: dict[str, float] = field(default_factory=dict)


class StepLanes:
    """The lanes of one rank. `begin` a step, `run` its operations in order, then `finish`."""

    def __init__(self, plan: Plan, cluster: Cluster, away: OffloadBytes, engine: str = "torch"):
        self.plan, self.cluster, self.units, self.away = plan, cluster, away.groups, away
        self.transfers = Transfers(cluster, away)
        self.updated: dict[str, float] = {}  # time at which a unit's update is done
        self.put_off: dict[str, float] = {}  # units whose update is not placed yet, and when it may begin
        self.waiting = WaitingGradients(away)  # units whose gradients still wait for their update
        self.arrived: dict[str, float] = {}  # time at which a unit's shard is on the device
        self.returned: dict[str, float] = {}  # time at which its activations are
        self.spilled: dict[str, float] = {}  # time at which its activations are on the host
        self.on_disk: dict[str, float] = {}  # time at which they are on disk, later back on the host
        self.began = 0.0  # start of the step
        precision = plan.precision
        self.machine = Machine(cluster, precision.compute, mesh=plan.mesh, kernels=plan.kernels, float8=precision.float8)
        self.free = dict.fromkeys(LANES, 0.0)
        self.links = {"node": 0.0, "network": 0.0}
        self.host = 0.0
        self.slowdown = 0.0  # seconds that compute has still to take longer because of collectives beside it
        self.serial = cluster.device.kind == "cpu"
        self.bytes = UnitBytes(plan, away, gpu=not self.serial)
        self.compute, self.reduce_item, self.master = self.bytes.compute, self.bytes.reduce, self.bytes.master
        self.fitted = cluster.calibration
        self.launches = engine == "torch"  # whether the host issues kernels one by one; XLA runs the step as one program
        self.compiled = {u.name for u in plan.units if is_compiled(plan, u)}
        self.unpacked = 0.0  # time at which the last gather was copied out; the next may only start then
        self.ready: dict[str, float] = {}  # time at which a unit's gather is done
        self.summed: set[str] = set()  # units whose gradients are summed in a wider dtype
        self.reduced: dict[str, float] = {}  # time at which a unit's reduction is done
        self.starts: list[tuple[float, Timeline]] = []  # start of each micro-batch, and the seconds counted until then
        self.found = Timeline()
        self.known: dict[tuple[str, int, int, int], tuple[float, str]] = {}  # seconds and link of collectives
        self.place_one = {kind: getattr(self, f"_{kind}", None) for kind in get_args(OperationKind)}

    def begin(self) -> None:
        """Start another step. The result is that of the last one."""
        self._place_updates()
        self.began = max(*self.free.values(), self.host)
        self.slowdown = 0.0
        self.starts.clear()
        self.found = Timeline(busy=dict.fromkeys((*LANES, "host"), 0.0))
        self.transfers.busy = self.found.busy
        self.transfers.began, self.transfers.disk_pieces_done = -1.0, 0
        self.waiting.units.clear()

    def run(self, op: Operation) -> None:
        """Place one operation."""
        if place := self.place_one[op.kind]:  # frees take no time
            place(op)

    def finish(self, repeats: int, spread: float) -> Timeline:
        """The seconds of the step. `repeats`: micro-batches like the second that were left out."""
        self._place_updates()
        end = max(*self.free.values(), self.host) - self.began
        if repeats > 0:
            (second, before), (third, after) = self.starts[1:3]
            end += repeats * (third - second)
            self._repeat(repeats, before, after)
        late = end * spread * math.sqrt(2 * math.log(self.plan.mesh.devices))
        self._expose("others", late)
        self.found.seconds = end + late
        return self.found

    def _repeat(self, times: int, before: Timeline, after: Timeline) -> None:
        """Add `times` what was counted between the two."""
        for table in ("busy", "exposed", "compute"):
            mine, old = getattr(self.found, table), getattr(before, table)
            for key, seconds in getattr(after, table).items():
                mine[key] += times * (seconds - old.get(key, 0.0))

    # -- lanes ---------------------------------------------------------------------------------------

    def _issue(self, kernels: float) -> None:
        if not self.launches:
            return
        self.host += kernels * self.machine.issued
        self.found.busy["host"] += kernels * self.machine.issued

    def _on_compute(self, seconds: float, kind: str, kernels: float = 1.0) -> None:
        """Place work on the compute lane. It cannot end before the host has issued its last kernel."""
        before = self.host
        self._issue(kernels)
        start = max(self.free["compute"], self.host if self.serial else before)
        longer = min(self.slowdown, self.fitted.overlap_slowdown * seconds)
        self.slowdown -= longer
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
        if seconds > ROUNDING:
            self.found.exposed[cause] = self.found.exposed.get(cause, 0.0) + seconds

    def _collective(
        self, lane: str, kind: str, nbytes: int, ranks: int, stride: int, earliest: float, passes: float = 0.0
    ) -> float:
        """Place a collective that may start at `earliest`; return when it ends. `passes`: seconds of the same lane before and
        after it, in which the link is free."""
        key = (kind, nbytes, ranks, stride)
        if key not in self.known:
            link = "network" if spread_of(ranks, stride, self.cluster).nodes > 1 else "node"
            self.known[key] = collective_seconds(kind, nbytes, ranks, self.cluster, stride=stride), link  # type: ignore[arg-type]
        seconds, link = self.known[key]
        start = max(self.free[lane], self.links[link], earliest, self.host)
        self.links[link] = start + seconds
        end = self.free[lane] = start + seconds + passes
        self.found.busy[lane] += seconds + passes
        if self.serial:
            self._wait(end, lane)
            self.host = end
        else:
            self.slowdown += self.fitted.overlap_slowdown * (seconds + passes)
        return end

    def _quantized(self, passes: Quantization | None, op: Operation, packed: float, unpacked: float, results: float) -> float:
        """Seconds to pack and unpack so many elements around a collective; 0 if it is plain. `results`: see `Quantization`."""
        if passes is None or not op.sent:
            return 0.0
        sizes = self.units[op.unit]
        self._issue(passes.kernels(len(sizes.trained if op.kind == "reduce" else sizes.shards)))
        moved = passes.moved(packed, unpacked, results)
        return self.machine.copy(moved) if passes.fused else self.machine.add(moved)

    # -- operations ----------------------------------------------------------------------------------

    def _compute(self, op: Operation) -> None:
        assert op.section is not None
        if op.phase == "start":
            so_far = self.found
            counted = Timeline(busy=dict(so_far.busy), exposed=dict(so_far.exposed), compute=dict(so_far.compute))
            self.starts.append((self.free["compute"], counted))
        backward = op.phase in BACKWARD
        if backward and self.transfers.began < 0 and (self.away.late or op.micro == self.plan.batch.accumulate - 1):
            self.transfers.began = self.free["compute"]
        if op.unit in self.compiled and op.phase in ("forward", "backward"):
            self._issue(self.fitted.compiled_guards)
        self._place(self.machine.section(op.section, *op.shape, backward=backward, chunk=op.phase == "chunk"))

    def _place(self, work: SectionTime) -> None:
        if not work.kernels:
            return
        kernels = work.kernels + work.python / self.machine.issued  # `python` in units of issued operations
        for kind in ("gemm", "attention", "pointwise"):
            if (seconds := getattr(work, kind)) > 0:
                self._on_compute(seconds, kind, kernels * seconds / work.seconds)
        if work.waits:
            self._inside(work.waits)

    def _inside(self, seconds: float) -> None:
        """Place collectives of the tensor or expert axis, which the next kernel waits for."""
        ranks, lane = (self.plan.mesh.expert, "experts") if self.plan.mesh.expert > 1 else (self.plan.mesh.tensor, "tensor")
        link = "network" if spread_of(ranks, 1, self.cluster).nodes > 1 else "node"
        start = max(self.free["compute"], self.links[link], self.host)
        self.free[lane] = self.links[link] = start + seconds
        self.found.busy[lane] += seconds
        self._wait(start + seconds, lane)
        if self.serial:
            self.host = start + seconds

    def _gather(self, op: Operation) -> None:
        sizes = self.units[op.unit]
        stride = axis(self.plan.mesh, "shard")[1] * sizes.stride
        cast = self.machine.copy(self.bytes.copied_in(sizes))
        if self.serial:
            self._on_compute(cast, "copies")
        there = max(self.updated.get(op.unit, 0.0), self.arrived.get(op.unit, 0.0))
        elements, earliest = sum(sizes.gathered), max(self.unpacked + cast, there)
        passes = self._quantized(self.bytes.gather_passes, op, elements / op.ranks, elements, elements)
        end = self._collective("gather", "all_gather", op.sent or op.nbytes, op.ranks, stride, earliest, passes)
        self.ready[op.unit] = end

    def _unpack(self, op: Operation) -> None:
        sizes = self.units[op.unit]
        updated = self.updated.pop(op.unit, 0.0)
        self.host = max(self.host, updated)  # the host waits for the cores
        self._wait(updated, "update")
        self._wait(self.arrived.pop(op.unit, 0.0), "fetch")
        self._wait(self.ready.pop(op.unit, 0.0), "gather")
        copied = self.machine.copy(self.bytes.copied_out(sizes))
        self._on_compute(copied, "copies", self._hook_ops(sizes, sizes.gathered))
        self.unpacked = self.free["compute"]

    def _accumulate(self, op: Operation) -> None:
        """The first gradient is cast if the sum is in a wider dtype; the others are added."""
        sizes = self.units[op.unit]
        elements = self._gradient_elements(sizes)
        if not op.first:
            seconds = self.machine.add(elements * (self.compute + 2 * self.reduce_item))
        elif self.compute != self.reduce_item:
            seconds = self.machine.join(elements, self.compute, self.reduce_item)
            self.summed.add(op.unit)
        else:
            seconds = 0.0
        reduces = op.micro == self.plan.batch.accumulate - 1  # then the hooks are counted there
        self._on_compute(seconds, "copies", 1.0 if reduces else self._hook_ops(sizes, sizes.trained, adding=True))

    def _reduce(self, op: Operation) -> None:
        sizes = self.units[op.unit]
        read = self.reduce_item if op.unit in self.summed else self.compute
        self.summed.discard(op.unit)
        elements = self._gradient_elements(sizes)
        joined = self.machine.join(elements, read, self.reduce_item)
        if sizes.takes_gradients:
            joined = 0.0 if self.bytes.computed or read == self.master else self.machine.copy(elements * (read + self.master))
        self._on_compute(joined, "copies", self._hook_ops(sizes, sizes.trained))
        self.reduced[op.unit] = self.free["compute"]
        if op.ranks > 1:
            stride = axis(self.plan.mesh, "shard")[1] * self.units[op.unit].stride
            kind = "all_to_all" if op.sent else "reduce_scatter"
            passes = self._quantized(self.bytes.reduce_passes, op, elements, elements, elements / op.ranks)
            nbytes, ready = op.sent or op.nbytes, self.free["compute"]
            self.reduced[op.unit] = self._collective("reduce", kind, nbytes, op.ranks, stride, ready, passes)

    def _all_reduce(self, op: Operation) -> None:
        if op.unit:
            alone = self.units[op.unit].world == 1
            stride = axis(self.plan.mesh, "data" if alone else "replicate")[1]
            done = self._collective("copies", "all_reduce", op.nbytes, op.ranks, stride, self.reduced[op.unit])
            if alone:
                self.reduced[op.unit] = done
        elif op.ranks > 1:
            self._on_compute(collective_seconds("all_reduce", op.nbytes, op.ranks, self.cluster), "agree")

    def _drain(self, op: Operation) -> None:
        self._wait(self.reduced.get(op.unit, 0.0), "reduce")

    def _norm(self, op: Operation) -> None:
        self._wait(max(self.free["reduce"], *self.reduced.values(), 0.0), "reduce")
        self._wait(self.free["copies"], "copies")
        nbytes = sum(g.moving * self.bytes.kept_gradient(g) for g in self.units.values())
        self._on_compute(
            self.machine.foreach(nbytes),
            "norm",
            self.fitted.step_ops + self.fitted.parameter_hooks / 2 * self._trained_tensors(),
        )

    def _update(self, op: Operation) -> None:
        if op.unit:
            self._update_offloaded(self.units[op.unit])
        else:
            self._update_resident([g for g in self.units.values() if not g.away], clip=self.away.clip)

    def _update_resident(self, resident: list[UnitSizes], *, clip: bool) -> None:
        elements = sum(g.moving for g in resident)
        tensors = sum(len(g.trained) for g in resident)
        clipped = self.machine.foreach(elements * 2 * self.master) if clip and not self.bytes.one_pass else 0.0
        gradient = self.compute if self.bytes.computed else self.master
        moments = self.away.slots * sum(g.moment_bytes(self.plan.precision) for g in resident)
        moved = elements * (2 * self.master + gradient) + 2 * moments  # parameter and state in and out
        self._on_compute(self.machine.update(moved) + clipped, "update", self.fitted.parameter_hooks / 2 * tensors)

    # -- offload ---------------------------------------------------------------------------------

    def _update_offloaded(self, sizes: UnitSizes) -> None:
        """Place the update of an offloaded unit: after the norm, or once its gradient is reduced."""
        ready = self.free["compute"] if self.away.late else max(self.reduced[sizes.name], self._copies_done(sizes))
        if sizes.home.optimizer == "device":  # only its parameters are off the device
            self._update_resident([sizes], clip=False)
            nbytes = sizes.moving * self.compute
            self.updated[sizes.name] = self.transfers.spill(nbytes, self.free["compute"])
        elif self.transfers.gpu and self.away.by_need:
            self.put_off[sizes.name] = ready
        elif self.transfers.gpu:
            self.updated[sizes.name] = self.transfers.update(sizes.name, ready)
        else:
            self._on_compute(sizes.moving * self.transfers.core, "update")
            self.updated[sizes.name] = self._on_cpu_disk(sizes)
        for gone in self.waiting.add(sizes.name) if self.away.backlog else ():
            read = self.transfers.taken.get(gone, 0.0)
            self.host = max(self.host, read)
            self._wait(read, "update")

    def _place_updates(self) -> None:
        """Place updates that were put off, in the order of forward, each in the free time since its gradient was ready."""
        for name in (n for n in self.units if n in self.put_off):
            self.updated[name] = self.transfers.update(name, self.put_off[name])
        self.put_off.clear()

    def _copies_done(self, sizes: UnitSizes) -> float:
        return self.free["copies"] if sizes.copies > 1 else 0.0

    def _on_cpu_disk(self, sizes: UnitSizes) -> float:
        """On a CPU: the time at which an update is done and its state and parameters are on disk again."""
        done = self.free["compute"]
        if sizes.home.optimizer == "disk":
            nbytes = sizes.moving * self.away.state
            done = max(done, self.transfers.place("disk", self.transfers.began, nbytes / self.transfers.read))
            self.transfers.place("disk", done, nbytes / self.transfers.write)
        if sizes.home.params == "disk":
            done = self.transfers.place("disk", done, sizes.moving * self.compute / self.transfers.write)
        return done

    def _fetch(self, op: Operation) -> None:
        """A shard is fetched one unit ahead: after the last gather was copied out and after the unit's own update."""
        if op.what == "activations" and op.unit in self.on_disk:
            self.on_disk[op.unit] = self.transfers.read_back(op.nbytes, max(self.free["compute"], self.on_disk[op.unit]))
            return
        if op.what == "activations":
            self.returned[op.unit] = self.transfers.fetch(op.nbytes, self.free["compute"])
            return
        updated = self.updated.get(op.unit, 0.0)
        if self.units[op.unit].home.params == "disk":
            self.arrived[op.unit] = self.transfers.fetch_from_disk(op.nbytes, self.unpacked, updated)
        else:
            self.arrived[op.unit] = self.transfers.fetch(op.nbytes, max(self.unpacked, updated))

    def _spill(self, op: Operation) -> None:
        if op.what == "gradients":
            sizes = self.units[op.unit]
            self.transfers.drain(op.unit, max(self.reduced[op.unit], self._copies_done(sizes)))
        elif self.units[op.unit].home.activations == "disk":
            self.spilled[op.unit], self.on_disk[op.unit] = self.transfers.spill_to_disk(op.nbytes, self.free["compute"])
        else:
            self.spilled[op.unit] = self.transfers.spill(op.nbytes, self.free["compute"])

    def _forget(self, op: Operation) -> None:
        """Memory of activations is free once they are copied."""
        if op.what == "activations":
            self._wait(self.spilled.pop(op.unit), "spill")

    def _await(self, op: Operation) -> None:
        """Wait for activations. Updates are waited for at gather and unpack."""
        if op.what == "activations" and op.unit in self.on_disk:  # the host waits for the disk
            self.host = max(self.host, self.on_disk.pop(op.unit))
            self.returned[op.unit] = self.transfers.fetch(op.nbytes, max(self.host, self.free["compute"]))
        if op.what == "activations":
            self._wait(self.returned.pop(op.unit), "fetch")

    def _hook_ops(self, sizes: UnitSizes, passing: tuple[int, ...], *, adding: bool = False) -> float:
        """Host time of a unit's hooks, in operations: for the unit and for each parameter. `adding`: only gradients are added."""
        fitted = self.fitted
        hooks = fitted.single_rank_hooks if sizes.world == 1 else fitted.accumulate_hooks if adding else fitted.unit_hooks
        return hooks + fitted.parameter_hooks * len(passing)

    def _gradient_elements(self, sizes: UnitSizes) -> int:
        """Elements of a unit's unreduced gradients."""
        return sizes.gradient_elements

    def _trained_tensors(self) -> int:
        return sum(len(g.trained) for g in self.units.values())
