"""The optimizer of away units: gradients arrive under backward, updates run beside it or beside the next forward.

Without clipping a unit is updated as soon as its gradient is reduced; backward waits where the plan allows no more of them
to wait for that. With clipping (or a loss scale) all wait for the global norm; until then the CPU's share of the gradients
drains to the host and the first pieces of state come up. Either way the next gather of a unit waits for that unit's own
update and for nothing else.

All this is the engine's own step, between `begin` and `update`. Outside of it, gradients stay in `.grad`, in the master's
dtype as on the device, until the caller's `optimizer.step()` (`optimizer_hooks`) hands them over with `update_from_grad`.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import FullshardError
from fullshard.on_torch.dtypes import PLAN_DTYPES
from fullshard.on_torch.offload.events import Moment, Stream
from fullshard.on_torch.offload.stores.resting import Resting
from fullshard.on_torch.offload.units import Away, gradient_dtype, local
from fullshard.on_torch.offload.updates.buffers import segment_views
from fullshard.on_torch.offload.updates.copy_queue import Bus
from fullshard.on_torch.offload.updates.cpu import Cores
from fullshard.on_torch.offload.updates.cpu_share import update_threads
from fullshard.on_torch.offload.updates.gpu import Streamed
from fullshard.on_torch.offload.updates.gradient_limit import Backlog
from fullshard.on_torch.offload.updates.lane import Lane
from fullshard.on_torch.offload.updates.lane_memory import make_staging, make_trays, widen_trays
from fullshard.on_torch.offload.updates.threads import Crew
from fullshard.on_torch.offload.updates.unit_update import Go, Job
from fullshard.on_torch.private import avoid_reduction_uploads
from fullshard.on_torch.sharded_optimizer import copies_of
from fullshard.plan import Plan
from fullshard.storage.host import Arena, room
from fullshard.update_pieces import DISK_SLOTS
from fullshard.update_pieces import Lane as LaneName

AHEAD = 3  # gathers: enough to keep the device busy


class Tiered:
    """Carries the updates of away units. Made by `shard`; the step calls `begin`, `backward_done`, `update` and `end`."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        resting: Resting,
        optimizer: torch.optim.Optimizer | None,
    ):
        self.plan, self.device, self.rule, self.resting = plan, device, resting.rule, resting
        # It keeps this one alive, by its hooks: in a circle both would stay until somebody looks for circles.
        self._optimizer = weakref.ref(optimizer) if optimizer else lambda: None
        self.units, self.groups = resting.units, resting.groups
        self.places = {id(p): (a, i) for a in self.units for i, p in enumerate(a.params)}
        self.dtype, self.master = gradient_dtype(plan), PLAN_DTYPES[plan.precision.master]
        self.steps = {id(a): [0] * a.trained for a in self.units}
        self.jobs: dict[int, Job] = {}  # the last one of each unit
        self.coming: dict[int, Job] = {}  # those that wait for the norm
        self.in_step = self.eager = self.draining = self.last = False
        self.go, self.backlog = Go(), Backlog(plan.backlog)
        self.norms: dict[int, Tensor] = {}  # of this rank's gradients, by parameter
        self.received: dict[str, list[Tensor]] = {}  # the same, by unit
        self.arrived: dict[int, set[int]] = {id(a): set() for a in self.units}
        self.doubtful: Go | None = None  # an eager step of which it is not known yet whether its gradients were finite
        self.settings: list[dict[str, Any]] = []  # the optimizer's groups as they are in this step
        order = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]} if optimizer else {}
        self.group_of = {id(a): [order[id(p)] for p in a.params[: a.trained]] for a in self.units}
        self.begun: deque[Moment] = deque(maxlen=AHEAD)
        self.drain = Stream(device)
        self.drain_views: dict[int, list[Tensor]] = {}
        self.drains: dict[int, Tensor] = {}
        self._lanes()
        self._hook()
        avoid_reduction_uploads()
        resting.watch(_weakly(self._raise))
        # The lanes' threads must have ended before the interpreter does, and go when the state goes.
        self.close = weakref.finalize(self, _end, self.gpu, self.cpu, self.streamed.back, self.cores.crew, self.cores.post)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer()

    # -- made once -----------------------------------------------------------------------------------

    def _lanes(self) -> None:
        pieces = [p for a in self.units for p in a.pieces]
        ring = min(self.plan.staging, sum(p.lane == "gpu" for p in pieces))
        if self.resting.spooled:  # a slot of the device holds one of the file's
            ring = min(ring, DISK_SLOTS)
        in_turn = self.resting.spooled is not None or self.plan.backlog is not None  # what came first makes room first
        slots, bench = make_staging(self.resting, ring)
        self.bus = bus = Bus.of(self.device)
        self.streamed = streamed = Streamed(self.device, self.rule, self.resting, slots, bench, self.resting.emit, bus)
        self.gpu = Lane("stream", max(1, ring), streamed, in_turn=in_turn)
        trays = make_trays(self.resting, self.dtype)
        threads = update_threads()
        self.cores = cores = Cores(self.device, self.rule, self.resting, trays, self.resting.emit, bus, threads=threads)
        self.cpu = Lane("cores", cores.depth, cores, in_turn=in_turn)
        cores.failed, streamed.failed = self.cpu.fail, self.gpu.fail

    def _hook(self) -> None:
        for away in self.units:
            for i, p in enumerate(away.params[: away.trained]):
                p.register_post_accumulate_grad_hook(partial(_weakly(self._arrive, away), i))
            needed = away.unit.home.params != "device"  # to gather at all
            doors = [_weakly(m, away, needed=needed) for m in (self._before_gather, self._at_copy, self._after_copy)]
            self.groups[away.unit.name].around_gather(*doors)

    # -- a step ----------------------------------------------------------------------------------------

    def begin(self, *, eager: bool, draining: bool) -> None:
        """Before the first micro-batch. `eager`: update under backward."""
        self._open(eager, draining)
        self.resting.begin()
        self.backlog.begin()
        self.in_step = True
        if draining and not self.drains:
            self._make_drains()
        for arrived in self.arrived.values():
            arrived.clear()

    def _open(self, eager: bool, draining: bool) -> None:
        """A new step, with the optimizer's settings as they are now."""
        self._raise()
        self._doubt()
        self.go.drop()  # of a step that was given up in the middle, else long said
        self.coming = {}
        self.eager, self.draining, self.go = eager, draining, Go()
        self.norms, self.received = {}, {}
        groups = self.optimizer.param_groups if self.optimizer else []
        self.settings = [{k: _number(v) for k, v in g.items() if k != "params"} for g in groups]

    def end(self) -> None:
        """After a step, also one that was given up: gradients belong to the caller from here on."""
        self.in_step = self.last = False

    def loss_known(self, summed: Tensor, *, last: bool) -> None:
        """Before the backward of a micro-batch. Updates under the last one happen only where every rank's loss is finite;
        for those that wait for the norm the first state comes up."""
        self.last = last
        if self.eager and last:
            bad = (~summed.isfinite()).double()
            dist.all_reduce(bad)
            self.go.say([], bad, self.device)
        elif not self.eager and not self.coming:
            self._bring_first()

    def _bring_first(self) -> None:
        """The state that the GPU will update first comes up while gradients are made. After the last step's updates: a
        lane that holds a piece of this step has to wait for its norm."""
        for job in self.jobs.values():
            job.issued.wait()
        self.coming = {id(a): self._job(a) for a in self.units}
        self.resting.expect([p for a in self.units for p in a.pieces])
        for away in self.units:
            self._give(self.coming[id(away)], "gpu")

    def _job(self, away: Away) -> Job:
        job = Job(away, self.go)
        if not away.pieces:
            job.issued.set()
        return job

    def _arrive(self, away: Away, index: int, p: nn.Parameter) -> None:
        """A reduced gradient is there; on FSDP's stream."""
        if self.last:
            arrived = self.arrived[id(away)]
            arrived.add(index)
            if len(arrived) == away.trained:
                self._reduced(away)

    def _reduced(self, away: Away) -> None:
        """All gradients of a unit are there."""
        job = self._job(away) if self.eager else self.coming[id(away)]
        self._take(job)
        there = [(p, g) for p, g in zip(away.params, job.gradients, strict=False) if g is not None]
        if there:
            norms = torch._foreach_norm([g for _, g in there], 2.0, self.master)
            self.norms |= {id(p): norm for (p, _), norm in zip(there, norms, strict=True)}
            self.received[away.unit.name] = list(norms)
        if self.eager:
            self._keep(job)
            self.jobs[id(away)] = job
            self.resting.expect(away.pieces)
            self.resting.renew([away])
            self._give(job, "cpu")
            self._give(job, "gpu")
            self.backlog.add(job)
            self._raise()
        elif self.draining:
            self._drain(job)

    def _take(self, job: Job) -> None:
        """A unit's gradients, from its parameters; there when the current stream is."""
        params = job.away.params[: job.away.trained]
        found = [local(p.grad).contiguous() if p.grad is not None else None for p in params]
        job.gradients, job.had, job.ready = found, [g is not None for g in found], Moment.here(self.device)
        self._settings(job)
        for p in params:
            p.grad = None

    def _settings(self, job: Job) -> None:
        job.groups = [self.settings[i] for i in self.group_of[id(job.away)]]
        job.steps = [step + 1 for step in self.steps[id(job.away)]]

    def _keep(self, job: Job) -> None:
        job.keep(self.streamed.work, self.bus.down.stream)

    def _make_drains(self) -> None:
        """Memory for the gradients of the CPU's pieces, between backward and the norm."""
        pieces = [p for a in self.units for p in a.pieces if p.lane == "cpu"]
        sizes = [p.elements * self.dtype.itemsize for p in pieces]
        self.drain_arena = Arena(room(sizes), self.device.type == "cuda", "gradients that wait for the global norm")
        self.drains = {p.number: self.drain_arena.take(n).view(self.dtype) for p, n in zip(pieces, sizes, strict=True)}
        self.drain_views = {p.number: segment_views(self.drains[p.number], p) for p in pieces}

    def _give(self, job: Job, lane: LaneName) -> None:
        (self.cpu if lane == "cpu" else self.gpu).give(job, [p for p in job.away.pieces if p.lane == lane])

    def _drain(self, job: Job) -> None:
        """The CPU's share of a unit's gradients, to memory that waits for the norm."""
        with self.drain:
            self.drain.after(job.ready)
            for piece in job.away.pieces:
                if piece.lane == "cpu":
                    target = self.drains[piece.number]
                    job.collect(piece, self.drain_views[piece.number])
                    job.drained[piece.number] = (target, self.drain.moment())
                    self.bus.moved_down += target.nbytes
        for g in {g.untyped_storage().data_ptr(): g for g in job.gradients if g is not None}.values():
            self.drain.keep(g)
        if all(piece.lane == "cpu" for piece in job.away.pieces):
            job.gradients = []  # all of them are on the host

    def backward_done(self) -> None:
        """Units of which some parameters had no gradient are complete now."""
        for away in self.units:
            if away.trained and len(self.arrived[id(away)]) < away.trained:
                self._reduced(away)

    def square_norm(self) -> Tensor:
        """This rank's share of the squared norm of the away gradients; see `optim.square_norm`."""
        found: dict[int, list[Tensor]] = {}  # in the order of the model, as if they were resident
        for p in (p for a in self.units for p in a.params):
            if id(p) in self.norms:
                found.setdefault(copies_of(p), []).append(self.norms[id(p)])
        shares = [torch.linalg.vector_norm(torch.stack(n)).double().square() / copies for copies, n in found.items()]
        return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64, device=self.device)

    def update(self, factors: list[Tensor], skip: Tensor) -> None:
        """After the norm is known. Units follow in the order in which the next forward needs them."""
        if self.eager:
            self.doubtful = Go()
            self.doubtful.say([], skip, self.device)
            self.resting.end()
            return
        self.jobs, self.coming = self.coming, {}
        for job in self.jobs.values():
            self._keep(job)
        self.resting.renew(self.units)
        self.resting.end()
        self.go.say(factors, skip, self.device)
        for job in self.jobs.values():
            self._give(job, "cpu")

    def update_from_grad(self, factors: list[Tensor], skip: Tensor) -> None:
        """A step of the caller's own: update with whatever is in `.grad` now, and take it."""
        if all(p.grad is None for a in self.units for p in a.params[: a.trained]):
            return
        self._open(eager=False, draining=False)
        self.resting.packed.pack()
        if self.dtype != self.master:
            widen_trays(self.cores.trays, self.resting)
        self._bring_first()
        for job in self.coming.values():
            job.wide = True
            self._take(job)
        self.update(factors, skip)

    # -- gathers -----------------------------------------------------------------------------------------

    def _pace(self) -> None:
        """The host runs AHEAD gathers ahead of the device and no more. Where the queue of launches is full, the call that
        waits for room keeps the lanes' calls out as well."""
        if len(self.begun) == AHEAD:
            self.begun[0].wait()
        self.begun.append(Moment.here(self.device))

    def _before_gather(self, away: Away) -> None:
        self._pace()
        group = self.groups[away.unit.name]
        group.reduce_into(self.dtype if self.in_step else self.master)
        for moment in self._finished(away):
            if moment.event is not None:
                group.hold_gathers(moment.event)
        if away.unit.home.params != "device":
            fetched = self.resting.fetch(away, self._finished(away))
            if fetched.event is not None:
                group.hold_gathers(fetched.event)

    def _at_copy(self, away: Away) -> None:
        for moment in self._finished(away):
            moment.hold_current()
        self.resting.arrived(away)

    def _after_copy(self, away: Away) -> None:
        if away.unit.home.params != "device":
            self.resting.release(away)

    def _finished(self, away: Away) -> list[Moment]:
        """When the unit's parameters are new; waits until that is queued."""
        job = self.jobs.get(id(away))
        if job is None:
            return []
        job.issued.wait()
        self._raise()
        self._count(job)
        return job.moments

    def _count(self, job: Job) -> None:
        """A job that was carried out counts, once."""
        if job.steps and not job.counted:
            job.counted = True
            if not job.go.wait()[1]:
                before = self.steps[id(job.away)]
                pairs = zip(before, job.steps, job.had, strict=True)
                self.steps[id(job.away)] = [new if had else old for old, new, had in pairs]

    # -- at rest -----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until everything queued is done and at rest."""
        for away in self.units:
            for moment in self._finished(away):
                moment.wait()
        self.streamed.settle()
        self.resting.settle()
        self._doubt(wait=True)
        self._raise()
        for away in self.units:
            self._publish_steps(away)

    @contextmanager
    def shown(self, *, changed: bool, at_rest: bool = False) -> Iterator[dict[str, Tensor]]:
        """By name, the master copies of all away parameters; torch's optimizer shows the moments as its own. `changed`:
        both are written to inside, and the shards follow. `at_rest`: what is on disk is not read, but shown on meta."""
        self.flush()
        found: dict[str, Tensor] = {}
        for away in self.units:
            tensors = self.resting.tensors(away, at_rest=at_rest)
            found |= {n: t["master"] for n, t in zip(away.names, tensors, strict=True)}
            for p, own in zip(away.params[: away.trained], tensors, strict=False):
                self._state(p).update({k: t for k, t in own.items() if k != "master"})
        try:
            yield found
            for away in self.units if changed else ():
                self._read_steps(away)
                self.resting.publish(away)
        except BaseException:
            changed = False  # what was half written stays as it was on disk; in memory the caller has to load again
            raise
        finally:
            for p in (p for a in self.units for p in a.params[: a.trained]):
                for key in self.rule.keys:
                    self._state(p).pop(key, None)
            self.resting.give_back(changed=changed)

    def moved(self) -> dict[str, int]:
        """Bytes over the bus each way, and from and to the disk, since the start."""
        bus, files = self.bus, [f for f in (self.resting.spooled, self.resting.filed) if f]
        found = {"up": bus.moved_up + self.resting.fetched_bytes, "down": bus.moved_down}
        return found | {"read": sum(f.read_bytes for f in files), "written": sum(f.written_bytes for f in files)}

    def holds(self, p: nn.Parameter) -> bool:
        return id(p) in self.places

    def _state(self, p: nn.Parameter) -> dict[str, Any]:
        return self.optimizer.state[p] if self.optimizer else {}

    def place_of(self, p: nn.Parameter) -> tuple[Away, int]:
        """Its unit, and its index in it."""
        return self.places[id(p)]

    def set_steps(self, away: Away, steps: list[int]) -> None:
        """How many updates each trained parameter has had; at rest."""
        self.steps[id(away)] = steps
        self.jobs.clear()

    def _read_steps(self, away: Away) -> None:
        self.set_steps(away, [int(self._state(p).get("step", 0)) for p in away.params[: away.trained]])

    def _publish_steps(self, away: Away) -> None:
        if self.rule.kind != "sgd":
            for p, step in zip(away.params, self.steps[id(away)], strict=False):
                self._state(p)["step"] = torch.tensor(float(step))

    def _raise(self) -> None:
        for lane in (self.gpu, self.cpu):
            if lane.error is not None:
                raise lane.error

    def _doubt(self, wait: bool = False) -> None:
        """Gradients that were not finite, found after units were updated with them."""
        go = self.doubtful
        if go is None or not (wait or go.moment.done()):
            return
        self.doubtful = None
        if go.wait()[1] and not self.go.wait()[1]:
            raise FullshardError(
                "a gradient of the last step was not finite, and without clipping units are updated before that is known: "
                "go on from the last checkpoint, with optim.clip set so that such steps are skipped"
            )


def _number(value: Any) -> Any:
    """A setting of a group; some schedulers keep theirs in tensors."""
    return value.item() if isinstance(value, Tensor) else value


def _end(*threads: Lane | Crew) -> None:
    for each in threads:
        each.close()


def gone() -> FullshardError:
    return FullshardError("the state of this model is gone; keep what shard() returned for as long as the model is used")


def _weakly(method: Callable[..., None], *about: Away, needed: bool = False) -> Callable[..., None]:
    """A hook that keeps neither what it calls alive nor the units it is told: the lanes' threads hold on to parameters, and
    these to their hooks, where Python's collector of cycles does not look. `needed`: nothing goes without it."""
    found, units = weakref.WeakMethod(method), [weakref.ref(away) for away in about]

    def call(*arguments: Any) -> None:
        if (alive := found()) is not None:
            alive(*(unit() for unit in units), *arguments)
        elif needed:
            raise gone()

    return call
