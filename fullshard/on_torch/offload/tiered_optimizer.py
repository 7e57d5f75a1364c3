"""The optimizer of offloaded units: gradients arrive during backward, updates overlap with it or with the next forward.

Without clipping a unit is updated as soon as its gradient is reduced; backward waits if the plan's backlog is full. With
clipping (or a loss scale) all updates wait for the global norm. Until then the CPU's share of the gradients is copied to the
host, and the first pieces of state to the device. In both cases the next gather of a unit waits only for its own update.

This is the engine's own step, between `begin` and `update`. Outside of it, gradients stay in `.grad` in the master's dtype,
as on the device. The caller's `optimizer.step()` (`optimizer_hooks`) passes them to `update_from_grad`.
"""

import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.on_torch.offload.stores.offload_memory import OffloadMemory
from fullshard.on_torch.offload.stores.shard_fetcher import free_shards
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit, gradient_dtype
from fullshard.on_torch.offload.units.unit_update import StepDecision, UnitUpdate
from fullshard.on_torch.offload.units.weak_hooks import weakly
from fullshard.on_torch.offload.updates.copy_queue import CopyQueues
from fullshard.on_torch.offload.updates.cpu_lane import CpuUpdater
from fullshard.on_torch.offload.updates.cpu_share import update_threads
from fullshard.on_torch.offload.updates.gpu_lane import GpuUpdater
from fullshard.on_torch.offload.updates.gradient_limit import GradientLimit
from fullshard.on_torch.offload.updates.lane_memory import make_cpu_buffers, make_staging, widen_cpu_buffers
from fullshard.on_torch.offload.updates.update_lane import UpdateLane, close_all
from fullshard.on_torch.offload.updates.waiting_gradients import HostGradients
from fullshard.on_torch.optimizers.sharded_optimizer import copies_of, local_norms, sum_of_squares
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES
from fullshard.on_torch.tensors.shard_ranges import local
from fullshard.on_torch.tensors.streams import GatherPace, StreamEvent
from fullshard.on_torch.tensors.watched_shard import watch_values
from fullshard.plan.plan import Plan
from fullshard.plan.update_pieces import Lane


class TieredOptimizer:
    """Updates offloaded units. Made by `shard`; the step calls `begin`, `backward_done`, `update` and `end`."""

    def __init__(self, plan: Plan, device: torch.device, memory: OffloadMemory, optimizer: torch.optim.Optimizer | None):
        self.plan, self.device, self.rule, self.memory = plan, device, memory.rule, memory
        # The optimizer's hooks keep this object alive. A reference back would be a cycle, and both would stay until it is found.
        self._optimizer = weakref.ref(optimizer) if optimizer else lambda: None
        self.units = memory.units
        self.places = {id(p): (u, i) for u in self.units for i, p in enumerate(u.params)}
        self.dtype, self.master = gradient_dtype(plan), PLAN_DTYPES[plan.precision.master]
        self.in_step = self.eager = self.draining = self.last = False
        self.decision, self.limit = StepDecision(), GradientLimit(plan.backlog)
        self.unconfirmed: StepDecision | None = None  # an eager step whose gradients may turn out not to be finite
        self.settings: list[dict[str, Any]] = []  # the optimizer's groups in this step
        self.taken = False  # the last step was the caller's, and took the gradients
        order = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]} if optimizer else {}
        for unit in self.units:
            unit.settings = [order[id(p)] for p in unit.params[: unit.trained]]
        self.pace = GatherPace(device)
        self._make_lanes()
        self._hook()
        memory.watch(weakly(self._raise))
        # The lanes' threads must have ended before the interpreter does, and end with the state.
        threads = (self.gpu_lane, self.cpu_lane, self.gpu.returners, self.cpu.workers, self.cpu.senders)
        self.close = weakref.finalize(self, close_all, *threads)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer()

    # -- made once -----------------------------------------------------------------------------------

    def _make_lanes(self) -> None:
        memory, in_turn = self.memory, self.memory.sizes.in_turn
        self.queues = CopyQueues.of(self.device)
        slots, workspace = make_staging(memory)
        self.gpu = GpuUpdater(self.device, self.rule, slots, workspace, self.queues, memory.low_bit)
        self.gpu_lane = UpdateLane("gpu", max(1, len(slots)), self.gpu, in_turn=in_turn)
        buffers = make_cpu_buffers(memory, self.dtype)
        self.cpu = CpuUpdater(self.device, self.rule, buffers, self.queues, threads=update_threads(), low_bit=memory.low_bit)
        self.cpu_lane = UpdateLane("cpu", self.cpu.depth, self.cpu, in_turn=in_turn)
        self.cpu.failed, self.gpu.failed = self.cpu_lane.fail, self.gpu_lane.fail
        self.host_gradients = HostGradients(memory, self.dtype, self.queues)

    def _hook(self) -> None:
        for unit in self.units:
            for i, p in enumerate(unit.params[: unit.trained]):
                p.register_post_accumulate_grad_hook(partial(weakly(self._arrive, unit), i))
            unit.group.avoid_reduction_uploads()
            if unit.shards.on_device:
                unit.group.use_shards()
                for name, p in zip(unit.names, unit.params, strict=True):
                    watch_values(name, p, weakly(self._updated, unit))
            hooks = (self._before_gather, self._at_copy, self._after_copy)
            unit.group.around_gather(*(weakly(hook, unit, needed=not unit.shards.on_device) for hook in hooks))

    # -- a step ----------------------------------------------------------------------------------------

    def begin(self, *, eager: bool, draining: bool) -> None:
        """Before the first micro-batch. `eager`: update during backward. `draining`: copy the CPU's gradients to the host."""
        self.taken = False
        self._open(eager, draining)
        self.memory.begin()
        self.limit.begin()
        self.in_step = True
        if draining:
            self.host_gradients.allocate()
        for unit in self.units:
            unit.arrived.clear()

    def _open(self, eager: bool, draining: bool) -> None:
        """A new step, with the optimizer's settings as they are now."""
        self._raise()
        self._confirm()
        self.decision.cancel()  # of a step that was given up in the middle, else announced long ago
        for unit in self.units:
            unit.next_update, unit.norms = None, {}
        self.eager, self.draining, self.decision = eager, draining, StepDecision()
        groups = self.optimizer.param_groups if self.optimizer else []
        number = lambda v: v.item() if isinstance(v, Tensor) else v  # some schedulers keep theirs in tensors
        self.settings = [{k: number(v) for k, v in g.items() if k != "params"} for g in groups]

    def end(self) -> None:
        """After a step, also one that was given up: gradients belong to the caller from here on."""
        self.in_step = self.last = False

    def abandon(self) -> bool:
        """A step failed: what it has staged stays as it is. Returns whether units were updated already."""
        for unit in self.units:
            if unit.next_update is not None:
                update, unit.next_update = unit.next_update, None
                update.gradients, update.had, update.on_host = [None] * unit.trained, [False] * unit.trained, {}
                unit.update = update
                unit.shards.renew()
                self._give(update, "cpu")
        self.memory.end()
        self.decision.cancel()
        return (
            any(u.update is not None and u.update.decision is self.decision for u in self.units) and not self.decision.wait()[1]
        )

    def reset(self) -> None:
        """A forward or backward failed: free the shards that it has fetched."""
        for unit in self.units:
            if not unit.shards.on_device:
                free_shards(unit)

    def loss_known(self, summed: Tensor, *, last: bool) -> None:
        """Before the backward of a micro-batch. Eager updates run during the last one, and only if every rank's loss is
        finite. For updates that wait for the norm, the first state is copied to the device."""
        self.last = last
        if self.eager and last:
            bad = (~summed.isfinite()).double()
            dist.all_reduce(bad)
            self.decision.announce([], bad, self.device)
        elif not self.eager and all(unit.next_update is None for unit in self.units):
            self._stage_first()

    def _stage_first(self) -> None:
        """Copy the state that the GPU will update first to the device during backward. After the last step's updates: a
        lane that holds a piece of this step waits for its norm."""
        for unit in self.units:
            if unit.update is not None:
                unit.update.issued.wait()
        for unit in self.units:
            unit.next_update = self._new_update(unit)
            unit.state.expect(unit.pieces)
        for unit in self.units:
            self._give(self._next(unit), "gpu")

    def _new_update(self, unit: OffloadedUnit) -> UnitUpdate:
        update = UnitUpdate(unit, self.decision)
        if not unit.pieces:
            update.issued.set()
        return update

    def _next(self, unit: OffloadedUnit) -> UnitUpdate:
        assert unit.next_update is not None
        return unit.next_update

    def _arrive(self, unit: OffloadedUnit, index: int, p: nn.Parameter) -> None:
        """A reduced gradient is there; on FSDP's stream."""
        if self.last:
            unit.arrived.add(index)
            if len(unit.arrived) == unit.trained:
                self._reduced(unit)

    def _reduced(self, unit: OffloadedUnit) -> None:
        """All gradients of a unit are there."""
        update = self._new_update(unit) if self.eager else self._next(unit)
        self._take(update)
        there = [(i, g) for i, g in enumerate(update.gradients) if g is not None]
        if there:
            norms = local_norms([g for _, g in there])
            unit.norms = {i: norm for (i, _), norm in zip(there, norms, strict=True)}
        if self.eager:
            self._start(update)
        elif self.draining:
            self.host_gradients.copy(update)

    def _start(self, update: UnitUpdate) -> None:
        """Hand an eager update to the lanes; wait if too many gradients are on the device."""
        unit = update.unit
        self._keep(update)
        unit.update = update
        unit.state.expect(unit.pieces)
        unit.shards.renew()
        self._give(update, "cpu")
        self._give(update, "gpu")
        self.limit.add(update)
        self._raise()

    def _take(self, update: UnitUpdate) -> None:
        """Take a unit's gradients from its parameters; they are there when the current stream is."""
        unit = update.unit
        if unit.update is not None:
            self._count(unit.update)  # no gather has done so, if this step did not use the unit
        params = unit.params[: unit.trained]
        found = [local(p.grad).contiguous() if p.grad is not None else None for p in params]
        update.gradients, update.had, update.ready = found, [g is not None for g in found], StreamEvent.here(self.device)
        update.groups = [self.settings[i] for i in unit.settings]
        update.steps = [step + 1 for step in unit.steps]
        for p in params:
            p.grad = None

    def _keep(self, update: UnitUpdate) -> None:
        update.keep(self.gpu.work, self.queues.down.stream)

    def _give(self, update: UnitUpdate, lane: Lane) -> None:
        lanes = {"cpu": self.cpu_lane, "gpu": self.gpu_lane}
        lanes[lane].give(update, [p for p in update.unit.pieces if p.lane == lane])

    def backward_done(self) -> None:
        """Units of which some parameters had no gradient are complete now."""
        for unit in self.units:
            if unit.trained and len(unit.arrived) < unit.trained:
                self._reduced(unit)

    def drop(self, parameters: set[int]) -> None:
        """Drop the gradients of these parameters, by `id`. What an eager update has begun goes on."""
        for update in (unit.next_update for unit in self.units if unit.next_update is not None):
            update.drop(parameters)

    @property
    def received(self) -> dict[str, list[Tensor]]:
        """The norms of this rank's gradients in this step, by unit."""
        return {unit.name: list(unit.norms.values()) for unit in self.units if unit.norms}

    def square_norm(self) -> Tensor:
        """This rank's share of the squared norm of offloaded gradients; see `sharded_optimizer.square_norm`."""
        found: dict[int, list[Tensor]] = {}
        for unit in self.units:
            for i, norm in sorted(unit.norms.items()):
                found.setdefault(copies_of(unit.params[i]), []).append(norm)
        shares = [sum_of_squares(norms) / copies for copies, norms in found.items()]
        return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64, device=self.device)

    def update(self, factors: list[Tensor], skip: Tensor) -> None:
        """After the norm is known. Units follow in the order in which the next forward needs them."""
        if self.eager:
            self.unconfirmed = StepDecision()
            self.unconfirmed.announce([], skip, self.device)
            self.memory.end()
            return
        updates = [self._next(unit) for unit in self.units]
        for unit, update in zip(self.units, updates, strict=True):
            unit.update, unit.next_update = update, None
            self._keep(update)
            unit.shards.renew()
        self.memory.end()
        self.decision.announce(factors, skip, self.device)
        for update in updates:
            self._give(update, "cpu")

    def backward_ran(self) -> None:
        """There may be gradients again."""
        self.taken = False

    def update_from_grad(self, factors: list[Tensor], skip: Tensor) -> None:
        """A step of the caller's own: update with the gradients in `.grad`, and take them."""
        self.taken = True
        if all(p.grad is None for u in self.units for p in u.params[: u.trained]):
            return
        self._open(eager=False, draining=False)
        self.memory.packing.pack()
        if self.dtype != self.master:
            widen_cpu_buffers(self.cpu.buffers, self.memory)
        self._stage_first()
        for unit in self.units:
            update = self._next(unit)
            update.wide = True
            self._take(update)
        self.update(factors, skip)

    # -- gathers -----------------------------------------------------------------------------------------

    def _before_gather(self, unit: OffloadedUnit) -> None:
        self.pace.wait()
        unit.group.reduce_into(self.dtype if self.in_step else self.master)
        ready = self._finished(unit)
        if not unit.shards.on_device:
            ready = [*ready, self.memory.fetcher.fetch(unit, ready)]
        for event in ready:
            if event.cuda is not None:
                unit.group.hold_gathers(event.cuda)

    def _at_copy(self, unit: OffloadedUnit) -> None:
        for event in (*self._finished(unit), unit.fetched):
            event.hold_current()

    def _after_copy(self, unit: OffloadedUnit) -> None:
        if not unit.shards.on_device:
            self.memory.fetcher.release(unit)

    def _finished(self, unit: OffloadedUnit) -> list[StreamEvent]:
        """When the unit's parameters are new; waits until that is queued."""
        update = unit.update
        if update is None:
            return []
        update.issued.wait()
        self._raise()
        self._count(update)
        return update.events

    def _count(self, update: UnitUpdate) -> None:
        """Count an update that was not skipped, once."""
        if update.steps and not update.counted:
            update.counted = True
            if not update.decision.wait()[1]:
                pairs = zip(update.unit.steps, update.steps, update.had, strict=True)
                update.unit.steps = [new if had else old for old, new, had in pairs]

    def _updated(self, unit: OffloadedUnit) -> None:
        """Before the unit's shards are read from outside."""
        for event in self._finished(unit):
            event.hold_current()

    # -- between steps -----------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Before a forward. The engine's own step has confirmed the last one."""
        return None if self.in_step else self._confirm(wait=True)

    def flush(self, *, confirm: bool = True) -> None:
        """Wait until every update is done and its results are in their homes. `confirm`: raise if one used bad gradients."""
        for unit in self.units:
            for event in self._finished(unit):
                event.wait()
        self.gpu.settle()
        self.memory.settle()
        if confirm:
            self._confirm(wait=True)
        self._raise()
        for unit in self.units:
            self._publish_steps(unit)

    def moved(self) -> dict[str, int]:
        """Bytes over PCIe each way, and from and to the disk, since the start."""
        up, down = self.queues.moved_up + self.memory.fetcher.fetched_bytes, self.queues.moved_down
        return {"up": up, "down": down} | self.memory.moved()

    def holds(self, p: nn.Parameter) -> bool:
        return id(p) in self.places

    def place_of(self, p: nn.Parameter) -> tuple[OffloadedUnit, int]:
        """A parameter's unit, and its index in it."""
        return self.places[id(p)]

    def slots(self, p: nn.Parameter) -> dict[str, Any]:
        """What torch's optimizer shows as the parameter's state."""
        return self.optimizer.state[p] if self.optimizer else {}

    def set_steps(self, unit: OffloadedUnit, steps: list[int]) -> None:
        """Set the number of updates of each trained parameter; after `flush`."""
        unit.steps = steps
        for each in self.units:
            each.update = None

    def _publish_steps(self, unit: OffloadedUnit) -> None:
        if self.rule.kind != "sgd":
            for p, step in zip(unit.params, unit.steps, strict=False):
                self.slots(p)["step"] = torch.tensor(float(step))

    def _raise(self) -> None:
        for lane in (self.gpu_lane, self.cpu_lane):
            if lane.error is not None:
                raise lane.error

    def _confirm(self, wait: bool = False) -> None:
        """Raise if units were updated with gradients that turned out not to be finite."""
        decision = self.unconfirmed
        if decision is None or not (wait or decision.event.done()):
            return
        if decision.wait()[1] and not self.decision.wait()[1]:  # for good, until a checkpoint is loaded
            raise FullshardError(
                "a gradient of the last step was not finite, and without clipping units are updated before that is known: "
                "go on from the last checkpoint, with optim.clip set so that such steps are skipped"
            )
        self.unconfirmed = None
