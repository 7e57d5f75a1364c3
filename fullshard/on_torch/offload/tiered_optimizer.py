"""The optimizer of offloaded units: gradients arrive during backward, updates overlap with it or with the next forward.

Between `begin` and `end` the step is the engine's own. Outside of it, gradients stay in `.grad` in the master's dtype, as on the
device. The caller's `optimizer.step()` (`optimizer_hooks`) passes them to `update_from_grad`.

*When a unit is updated.* Without clipping a unit is updated as soon as its gradient is reduced (`eager`), if every rank's loss
is finite; backward waits while more gradients than the plan's backlog are on the device. That another gradient of the step was
not finite is known too late then, and raised. With clipping (or a loss scale) all updates wait for the global norm. Until then
the CPU's share of the gradients is copied to the host (`draining`), and the first pieces of state to the device.

*What a gather waits for.* The next gather of a unit waits for that unit's update alone: on the host until the lane has queued it
(`issued`), on FSDP's streams until its events. Units follow in the order of the next forward. So nobody may wait for a lane with
an update in it whose decision is still to be made by the thread that waits.

*Who frees gradients.* FSDP reduces a unit's gradients into one storage on its own stream, and drops it with `.grad`. An update
takes them, and names the streams that will read them, so that the allocator waits for those. The storage is dropped when the
last piece is read, and is free when the readers are done (`gradient_limit`).

*A step that fails.* What was staged for it stays in its order: the update goes through its lane without gradients, and its
decision, which is cancelled, says skip.

*Nothing refers back.* Torch's optimizer keeps this object alive by hooks. A reference back would be a cycle, and the lanes'
threads hold units, whose parameters hold their hooks: a cycle that Python's collector cannot see. So references back are weak.
"""

import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.on_torch.offload.gather_hooks import GatherHooks
from fullshard.on_torch.offload.optimizer_groups import OptimizerGroups
from fullshard.on_torch.offload.stores.offload_memory import OffloadMemory
from fullshard.on_torch.offload.stores.shard_fetcher import free_shards
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit, gradient_dtype
from fullshard.on_torch.offload.units.unit_update import StepDecision, UnitUpdate
from fullshard.on_torch.offload.units.weak_hooks import weakly
from fullshard.on_torch.offload.updates.copy_queue import CopyQueues
from fullshard.on_torch.offload.updates.finished_updates import FinishedUpdates
from fullshard.on_torch.offload.updates.gradient_limit import GradientLimit
from fullshard.on_torch.offload.updates.gradient_norms import take_norms
from fullshard.on_torch.offload.updates.lanes import make_lanes, widen_cpu_buffers
from fullshard.on_torch.offload.updates.update_lane import close_all
from fullshard.on_torch.offload.updates.waiting_gradients import HostGradients
from fullshard.plan.plan import Plan
from fullshard.plan.update_pieces import Lane


class TieredOptimizer:
    """Updates offloaded units. Made by `shard`; the step calls `begin`, `loss_known`, `backward_done`, `update` and `end`."""

    def __init__(self, plan: Plan, device: torch.device, memory: OffloadMemory, optimizer: torch.optim.Optimizer | None):
        self.device, self.rule, self.memory, self.units = device, memory.rule, memory, memory.units
        self.owners = {id(p): (u, i) for u in self.units for i, p in enumerate(u.params)}
        self.dtype, self.master = gradient_dtype(plan), memory.master
        self.in_step = self.eager = self.draining = self.last = False
        self.taken = False  # the last step was the caller's, and took the gradients
        self.decision, self.limit = StepDecision(), GradientLimit(plan.backlog)
        self.groups, self.queues = OptimizerGroups(optimizer, self.units), CopyQueues.of(device)
        self.gpu, self.gpu_lane, self.cpu, self.cpu_lane = make_lanes(memory, self.queues, self.dtype)
        self.host_gradients = HostGradients(memory, self.dtype, self.queues)
        self.finished = FinishedUpdates(self.gpu_lane, self.cpu_lane)
        self.gathers = GatherHooks(memory, self.finished, self.master)
        for unit in self.units:
            for i, p in enumerate(unit.params[: unit.trained]):
                p.register_post_accumulate_grad_hook(partial(weakly(self._arrive, unit), i))
        memory.watch(weakly(self.finished.refuse_failed))
        # The lanes' threads must have ended before the interpreter does, and end with the state.
        threads = (self.gpu_lane, self.cpu_lane, self.gpu.returners, self.cpu.workers, self.cpu.senders)
        self.close = weakref.finalize(self, close_all, *threads)

    # -- a step of the engine's own ------------------------------------------------------------------------

    def begin(self, *, eager: bool, draining: bool) -> None:
        """Before the first micro-batch. `eager`: update during backward. `draining`: copy the CPU's gradients to the host."""
        self.taken = False
        self._open(eager, draining)
        self.memory.begin()
        self.limit.begin()
        self.in_step, self.gathers.gradients = True, self.dtype
        if draining:
            self.host_gradients.allocate()
        for unit in self.units:
            unit.arrived.clear()

    def _open(self, eager: bool, draining: bool) -> None:
        """A new step, with the optimizer's settings as they are now."""
        self.finished.refuse_failed()
        self.finished.refuse_bad()
        self.decision.cancel()  # of a step that was given up in the middle, else announced long ago
        for unit in self.units:
            unit.next_update, unit.norms = None, {}
        self.eager, self.draining, self.decision = eager, draining, StepDecision()
        self.groups.read()

    def end(self) -> None:
        """After a step, also one that was given up: gradients belong to the caller from here on."""
        self.in_step = self.last = False
        self.gathers.gradients = self.master

    def abandon(self) -> bool:
        """See *A step that fails*. Returns whether units were updated already."""
        for unit in self.units:
            if unit.next_update is not None:
                unit.update, unit.next_update = unit.next_update, None
                unit.update.forget()
                unit.shards.renew()
                self._give(unit.update, "cpu")
        self.memory.end()
        self.decision.cancel()
        begun = any(u.update is not None and u.update.decision is self.decision for u in self.units)
        return begun and not self.decision.wait()[1]

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
            unit.next_update = UnitUpdate(unit, self.decision)
            unit.state.expect(unit.pieces)
        for unit in self.units:
            self._give(self._next(unit), "gpu")

    def _next(self, unit: OffloadedUnit) -> UnitUpdate:
        assert unit.next_update is not None
        return unit.next_update

    def _give(self, update: UnitUpdate, lane: Lane) -> None:
        lanes = {"cpu": self.cpu_lane, "gpu": self.gpu_lane}
        lanes[lane].give(update, [p for p in update.unit.pieces if p.lane == lane])

    def _arrive(self, unit: OffloadedUnit, index: int, p: nn.Parameter) -> None:
        """A reduced gradient is there; on FSDP's stream."""
        if self.last:
            unit.arrived.add(index)
            if len(unit.arrived) == unit.trained:
                self._reduced(unit)

    def _reduced(self, unit: OffloadedUnit) -> None:
        """All gradients of a unit are there."""
        update = UnitUpdate(unit, self.decision) if self.eager else self._next(unit)
        self._take(update)
        take_norms(unit, update.gradients)
        if self.eager:
            self._start(update)
        elif self.draining:
            self.host_gradients.copy(update)

    def _take(self, update: UnitUpdate) -> None:
        if update.unit.update is not None:
            self.finished.count(update.unit.update)  # no gather has done so, if this step did not use the unit
        update.take(self.groups.of(update.unit), self.device)

    def _start(self, update: UnitUpdate) -> None:
        """Hand an eager update to the lanes; wait if too many gradients are on the device."""
        unit = update.unit
        update.keep(self.gpu.work, self.queues.down.stream)
        unit.update = update
        unit.state.expect(unit.pieces)
        unit.shards.renew()
        self._give(update, "cpu")
        self._give(update, "gpu")
        self.limit.add(update)
        self.finished.refuse_failed()

    def backward_done(self) -> None:
        """Units of which some parameters had no gradient are complete now."""
        for unit in self.units:
            if unit.trained and len(unit.arrived) < unit.trained:
                self._reduced(unit)

    def drop(self, parameters: set[int]) -> None:
        """Drop the gradients of these parameters, by `id`. What an eager update has begun goes on."""
        for update in (unit.next_update for unit in self.units if unit.next_update is not None):
            update.drop(parameters)

    def update(self, factors: list[Tensor], skip: Tensor) -> None:
        """After the norm is known. Units follow in the order in which the next forward needs them."""
        if self.eager:
            gradients = StepDecision()
            gradients.announce([], skip, self.device)
            self.finished.eager = (self.decision, gradients)
            self.memory.end()
            return
        updates = [self._next(unit) for unit in self.units]
        for unit, update in zip(self.units, updates, strict=True):
            unit.update, unit.next_update = update, None
            update.keep(self.gpu.work, self.queues.down.stream)
            unit.shards.renew()
        self.memory.end()
        self.decision.announce(factors, skip, self.device)
        for update in updates:
            self._give(update, "cpu")

    # -- a step of the caller's own --------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Before a forward. The engine's own step has looked at the last one."""
        return None if self.in_step else self.finished.refuse_bad(wait=True)

    def reset(self) -> None:
        """A forward or backward failed: free the shards that it has fetched."""
        for unit in self.units:
            if not unit.shards.on_device:
                free_shards(unit)

    def backward_ran(self) -> None:
        """There may be gradients again."""
        self.taken = False

    def update_from_grad(self, factors: list[Tensor], skip: Tensor) -> None:
        """Update with the gradients in `.grad`, and take them."""
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

    # -- between steps -----------------------------------------------------------------------------------------

    def flush(self, *, confirm: bool = True) -> None:
        """Wait until every update is done and its results are in their homes. `confirm`: raise if one used bad gradients."""
        for unit in self.units:
            for event in self.finished.events(unit):
                event.wait()
        self.gpu.settle()
        self.memory.settle()
        if confirm:
            self.finished.refuse_bad(wait=True)
        self.finished.refuse_failed()
        for unit in self.units if self.rule.kind != "sgd" else ():
            self.groups.publish_steps(unit)

    def set_steps(self, unit: OffloadedUnit, steps: list[int]) -> None:
        """Set the number of updates of each trained parameter; after `flush`."""
        unit.steps = steps
        for each in self.units:
            each.update = None

    def moved(self) -> dict[str, int]:
        """Bytes over PCIe each way, and from and to the disk, since the start."""
        up, down = self.queues.moved_up + self.memory.fetcher.fetched_bytes, self.queues.moved_down
        return {"up": up, "down": down} | self.memory.moved()

    def holds(self, p: nn.Parameter) -> bool:
        return id(p) in self.owners

    def unit_of(self, p: nn.Parameter) -> tuple[OffloadedUnit, int]:
        """A parameter's unit, and its index in it."""
        return self.owners[id(p)]
