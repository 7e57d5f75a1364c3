"""The operations of a step laid onto lanes: when each lane is free, and what compute waited for.

Lanes are compute, gathers, reductions, all-reduces between copies, and collectives of the tensor or expert axis. Offload has
lanes of its own (`offload_lanes`), which go on from one step into the next.
"""

import math
from dataclasses import dataclass, field
from typing import get_args

from fullshard.cluster.topology import Cluster
from fullshard.plan.engine_traits import TRAITS
from fullshard.plan.plan import Plan
from fullshard.planner.step.effects import Collective, Effects, KernelWork, MessagePasses, Rate
from fullshard.planner.step.offload_bytes import OffloadBytes
from fullshard.planner.step.phases import BACKWARD, is_compiled
from fullshard.planner.step.schedule import Operation, OperationKind
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
        self.fitted = cluster.calibration
        self.launches = not TRAITS[engine].one_program  # whether the host issues kernels one by one
        self.rates = {rate: getattr(self.machine, rate) for rate in get_args(Rate)}
        self.compiled = {u.name for u in plan.units if is_compiled(plan, u)}
        self.unpacked = 0.0  # time at which the last gather was copied out; the next may only start then
        self.ready: dict[str, float] = {}  # time at which a unit's gather is done
        self.reduced: dict[str, float] = {}  # time at which a unit's reduction is done
        self.starts: list[tuple[float, Timeline]] = []  # start of each micro-batch, and the seconds counted until then
        self.found = Timeline()
        self.known: dict[Collective, tuple[float, str]] = {}  # seconds and link of collectives
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

    def run(self, op: Operation, effects: Effects) -> None:
        """Place one operation."""
        if place := self.place_one[op.kind]:  # frees take no time
            place(op, effects)

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

    def _seconds(self, kernels: KernelWork) -> float:
        """Seconds of the device's own kernels."""
        return sum((self.rates[rate](moved) for rate, moved in kernels.moved), 0.0)

    def _kernels(self, kernels: KernelWork | None) -> None:
        """Place kernels that no trace has, with the host's work for them."""
        assert kernels is not None
        issued = 1.0
        if kernels.issued is not None:
            hooks, parameters = kernels.issued
            issued = (getattr(self.fitted, hooks) if hooks else 0.0) + self.fitted.parameter_hooks * parameters
        self._on_compute(self._seconds(kernels), kernels.kind, issued)

    def _collective(self, wanted: Collective | None, earliest: float) -> float:
        """Place a collective that may start at `earliest`; return when it ends. Packing takes the lane before and after it, in
        which the link is free."""
        assert wanted is not None
        lane, passes = wanted.lane, self._packing(wanted.packing)
        if wanted not in self.known:
            stride = axis(self.plan.mesh, wanted.along)[1] * wanted.stride
            link = "network" if spread_of(wanted.ranks, stride, self.cluster).nodes > 1 else "node"
            self.known[wanted] = (
                collective_seconds(wanted.kind, wanted.nbytes, wanted.ranks, self.cluster, stride=stride),
                link,
            )
        seconds, link = self.known[wanted]
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

    def _packing(self, packing: MessagePasses | None) -> float:
        """Seconds to pack and unpack around a quantised collective."""
        if packing is None:
            return 0.0
        passes = packing.passes
        self._issue(passes.kernels(packing.parameters))
        moved = passes.moved(packing.packed, packing.unpacked, packing.results)
        return self.machine.copy(moved) if passes.fused else self.machine.add(moved)

    # -- operations ----------------------------------------------------------------------------------

    def _compute(self, op: Operation, effects: Effects) -> None:
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

    def _gather(self, op: Operation, effects: Effects) -> None:
        assert effects.kernels is not None
        cast = self._seconds(effects.kernels)  # on the stream of gathers
        if self.serial:
            self._kernels(effects.kernels)
        there = max(self.updated.get(op.unit, 0.0), self.arrived.get(op.unit, 0.0))
        self.ready[op.unit] = self._collective(effects.collective, max(self.unpacked + cast, there))

    def _unpack(self, op: Operation, effects: Effects) -> None:
        updated = self.updated.pop(op.unit, 0.0)
        self.host = max(self.host, updated)  # the host waits for the cores
        self._wait(updated, "update")
        self._wait(self.arrived.pop(op.unit, 0.0), "fetch")
        self._wait(self.ready.pop(op.unit, 0.0), "gather")
        self._kernels(effects.kernels)
        self.unpacked = self.free["compute"]

    def _accumulate(self, op: Operation, effects: Effects) -> None:
        self._kernels(effects.kernels)

    def _reduce(self, op: Operation, effects: Effects) -> None:
        self._kernels(effects.kernels)
        self.reduced[op.unit] = self.free["compute"]
        if effects.collective:
            self.reduced[op.unit] = self._collective(effects.collective, self.free["compute"])

    def _all_reduce(self, op: Operation, effects: Effects) -> None:
        wanted = effects.collective
        assert wanted is not None
        if op.unit:
            done = self._collective(wanted, self.reduced[op.unit])
            if wanted.along == "data":
                self.reduced[op.unit] = done
        elif wanted.ranks > 1:
            self._on_compute(collective_seconds(wanted.kind, wanted.nbytes, wanted.ranks, self.cluster), "agree")

    def _drain(self, op: Operation, effects: Effects) -> None:
        self._wait(self.reduced.get(op.unit, 0.0), "reduce")

    def _norm(self, op: Operation, effects: Effects) -> None:
        self._wait(max(self.free["reduce"], *self.reduced.values(), 0.0), "reduce")
        self._wait(self.free["copies"], "copies")
        self._kernels(effects.kernels)

    def _update(self, op: Operation, effects: Effects) -> None:
        if op.unit:
            self._update_offloaded(self.units[op.unit], effects)
        else:
            self._kernels(effects.kernels)

    # -- offload ---------------------------------------------------------------------------------

    def _update_offloaded(self, sizes: UnitSizes, effects: Effects) -> None:
        """Place the update of an offloaded unit: after the norm, or once its gradient is reduced."""
        ready = self.free["compute"] if self.away.late else max(self.reduced[sizes.name], self._copies_done(sizes))
        if sizes.home.optimizer == "device":  # only its parameters are off the device
            self._kernels(effects.kernels)
            nbytes = sizes.moving * self.away.compute
            self.updated[sizes.name] = self.transfers.spill(nbytes, self.free["compute"])
        elif self.transfers.gpu and self.away.by_need:
            self.put_off[sizes.name] = ready
        elif self.transfers.gpu:
            self.updated[sizes.name] = self.transfers.update(sizes.name, ready)
        else:
            self._on_compute(sizes.moving * self.transfers.core, "update")
            self.updated[sizes.name] = self._on_cpu_disk(sizes)
        for gone in effects.waited:
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
            done = self.transfers.place("disk", done, sizes.moving * self.away.compute / self.transfers.write)
        return done

    def _fetch(self, op: Operation, effects: Effects) -> None:
        """A shard is fetched one unit ahead: after the last gather was copied out and after the unit's own update."""
        if op.what == "activations" and op.unit in self.on_disk:
            self.on_disk[op.unit] = self.transfers.read_back(op.nbytes, max(self.free["compute"], self.on_disk[op.unit]))
            return
        if op.what == "activations":
            self.returned[op.unit] = self.transfers.fetch(op.nbytes, self.free["compute"])
            return
        updated = self.updated.get(op.unit, 0.0)
        if op.place == "disk":
            self.arrived[op.unit] = self.transfers.fetch_from_disk(op.nbytes, self.unpacked, updated)
        else:
            self.arrived[op.unit] = self.transfers.fetch(op.nbytes, max(self.unpacked, updated))

    def _spill(self, op: Operation, effects: Effects) -> None:
        if op.what == "gradients":
            sizes = self.units[op.unit]
            self.transfers.drain(op.unit, max(self.reduced[op.unit], self._copies_done(sizes)))
        elif op.place == "disk":
            self.spilled[op.unit], self.on_disk[op.unit] = self.transfers.spill_to_disk(op.nbytes, self.free["compute"])
        else:
            self.spilled[op.unit] = self.transfers.spill(op.nbytes, self.free["compute"])

    def _forget(self, op: Operation, effects: Effects) -> None:
        """Memory of activations is free once they are copied."""
        if op.what == "activations":
            self._wait(self.spilled.pop(op.unit), "spill")

    def _await(self, op: Operation, effects: Effects) -> None:
        """Wait for activations. Updates are waited for at gather and unpack."""
        if op.what == "activations" and op.unit in self.on_disk:  # the host waits for the disk
            self.host = max(self.host, self.on_disk.pop(op.unit))
            self.returned[op.unit] = self.transfers.fetch(op.nbytes, max(self.host, self.free["compute"]))
        if op.what == "activations":
            self._wait(self.returned.pop(op.unit), "fetch")
