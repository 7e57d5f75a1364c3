"""The ordered operations of one step: a pure function of the plan.

Follows FSDP2's hooks before and after each unit: gather and prefetch before it computes, free after, reduce when its
gradients are ready. Bytes and seconds of the operations are counted in `planner.memory` and `planner.time`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fullshard.model.costs import Phase, Section
from fullshard.model.description import Description
from fullshard.plan.engine_traits import TRAITS
from fullshard.plan.plan import HomeName, Plan
from fullshard.planner.step.float8_products import step_sections
from fullshard.planner.step.memo import remembered
from fullshard.planner.step.offload_bytes import waits_for_norm
from fullshard.planner.step.phases import neighbours, refuse_unpredicted
from fullshard.planner.step.saved_activations import Saved, leads, saved_tensors
from fullshard.planner.step.unit_sizes import UnitSizes, item, unit_sizes

# Of chunks of the loss, which the torch engine cuts by the same numbers.
CHUNK_BUDGET = 1 << 31  # bytes of logits alive at once, at most
CHUNK_TILE = 256  # tokens; matrix products are fastest in whole tiles
CHUNK_BYTES = 4  # of a logit, in fp32; its gradient takes its place
SPLIT_CHUNK_BYTES = 8  # of a split vocabulary, 2 in bf16, 4 in fp32, 2 for the gradient; and on JAX, whose softmax is apart

OperationKind = Literal[
    "compute",  # run a section of the trace
    "gather",  # issue the all-gather of a unit's shards
    "unpack",  # wait for it, and copy the parameters out of its buffer
    "release",  # drop the all-gather's buffer
    "free",  # drop gathered parameters
    "keep",  # drop them except for the part that `reshard` ranks keep
    "accumulate",  # keep unreduced gradients for the next micro-batch
    "reduce",  # reduce gradients to shards
    "all_reduce",  # reduce shards over the copies
    "drain",  # drop a reduction's input
    "settle",  # cast or add the reduced gradient, and drop what its reduction still holds
    "fetch",  # copy a unit's shard or activations to the device; from disk, activations go to the host first
    "spill",  # copy activations, or gradients that the CPU updates with, to the host
    "forget",  # free on the device what was spilled
    "await",  # wait for the unit's update of the previous step, or for its activations
    "norm",  # compute the gradient norm
    "update",  # update a unit whose parameters or state are off the device; without a unit, all others
    "zero",  # drop gradients
]
Payload = Literal["", "params", "gradients", "activations", "update"]


@dataclass(frozen=True)
class Operation:
    """One operation of a step. `nbytes`: of the whole tensor that a collective works on, or of a transfer. `sent`: of that
    tensor as it travels, if it is quantised. `section`: the part of the trace that a compute runs."""

    kind: OperationKind
    unit: str = ""
    micro: int = 0
    phase: Phase | Literal[""] = ""
    nbytes: int = 0
    ranks: int = 1
    sent: int = 0
    section: Section | None = None
    near: tuple[str, str] = ("", "")  # the units before and after: their tensors occur in sections
    shape: tuple[int, int] = (0, 0)  # rows and tokens that a compute works on: of a micro-batch, or of a chunk of the loss
    first: bool = False  # True if there is no earlier gradient to add to
    what: Payload = ""  # what a transfer moves, or a wait is for
    place: HomeName = "device"  # the home of what it moves
    saved: tuple[Saved, ...] = ()  # the activations that are spilled, forgotten or fetched


def schedule(
    plan: Plan,
    description: Description,
    *,
    loss: str = "chunked",
    micros: tuple[int, ...] = (),
    clip: bool = True,
    engine: str = "torch",
) -> tuple[Operation, ...]:
    """The operations of one step. `micros`: indices of the micro-batches to include, by default all. `clip`: whether gradients
    are clipped, so that updates wait for the norm. `engine`: on JAX gradients are always reduced after every micro-batch."""
    micros = micros or tuple(range(plan.batch.accumulate))
    make = lambda: tuple(_Step(plan, description, loss, clip, engine).run(micros))
    return remembered(description, "schedule", plan, (loss, micros, clip, engine), make)


def different_micro_batches(plan: Plan) -> tuple[int, ...]:
    """Indices of the first micro-batch, the second and the last: those between are like the second."""
    last = plan.batch.accumulate - 1
    return tuple(sorted({0, min(1, last), last}))


def chunks(plan: Plan, description: Description, engine: str = "torch") -> list[int]:
    """Tokens of each chunk of the chunked loss."""
    costs, tokens = description.costs, plan.batch.micro_batch * plan.batch.sequence
    assert costs is not None
    rows = costs.on(plan.mesh).vocabulary
    chunk = largest_chunk(rows, small=rows < costs.vocabulary or TRAITS[engine].one_program)
    return [min(chunk, tokens - i) for i in range(0, tokens, chunk)]


def largest_chunk(vocabulary: int, *, small: bool = False) -> int:
    """Tokens of a full chunk of the chunked loss. `small`: of a split vocabulary, or on JAX."""
    chunk = max(1, CHUNK_BUDGET // ((SPLIT_CHUNK_BYTES if small else CHUNK_BYTES) * vocabulary))
    return chunk - (chunk % CHUNK_TILE if chunk > CHUNK_TILE else 0)


class _Step:
    """FSDP's state while the schedule is built: which units are gathered, which gathers are under way."""

    def __init__(self, plan: Plan, description: Description, loss: str, clip: bool, engine: str):
        refuse_unpredicted(plan, description)
        self.plan = plan
        self.shape = (plan.batch.micro_batch, plan.batch.sequence)
        self.adds_up_whole = not TRAITS[engine].one_program  # gradients of units that stay gathered
        self.late = waits_for_norm(plan, clip)
        self.units = unit_sizes(plan, description)
        self.sections = step_sections(plan, description, loss, engine)
        self.scaled = False  # whether the scales of weights that are gathered in float8 are known
        self.near = neighbours(self.sections)
        self.description, self.engine = description, engine
        self.leads = leads(plan, list(self.near))
        self.saved = self._saved()
        self.awaited: set[str] = set()  # units whose update of the previous step is done
        self.spilled: list[tuple[Payload, str, int]] = []  # copies to the host under way: (what, unit, units until it is done)
        self.returned: set[str] = set()  # units whose activations were fetched
        self.order = list(self.units)
        self.gathered: set[str] = set()
        self.parts: set[str] = set()  # units of which `reshard` ranks keep the parameters after forward
        self.pending: set[str] = set()  # units whose gather is issued but not unpacked
        self.held: str | None = None  # the unit whose all-gather buffer forward still holds
        self.forwarded: list[str] = []  # units in the order of their forwards
        self.reducing: str | None = None  # the unit whose reduction still holds its input
        self.done: set[str] = set()
        self.sharded_grads: set[str] = set()
        self.waiting: set[str] = set()  # units with unreduced gradients from earlier micro-batches
        self.micro = 0
        chain = [u.name for u in plan.units if u.layout != "replicated" and u.modules != ("",)]
        ahead, back = plan.prefetch.forward, plan.prefetch.backward
        self.ahead = {n: chain[i + 1 : i + 1 + ahead] for i, n in enumerate(chain)} if ahead > 1 else {}
        self.back = {n: chain[max(0, i - back) : i][::-1] for i, n in enumerate(chain)} if back > 1 else {}

    def run(self, micros: tuple[int, ...]) -> Iterator[Operation]:
        last = self.plan.batch.accumulate - 1
        yield self._all("all_reduce", 8)  # tokens of the step
        for self.micro in micros:
            yield from self._micro_batch(self.micro == last)
        yield Operation("norm", micro=last)
        yield self._all("all_reduce", 48)  # norm and loss, and by which ranks tell whether they did the same work
        for sizes in self.units.values() if self.late else ():
            yield from self._update(sizes)
        yield Operation("update", micro=last)
        yield Operation("zero", micro=last)

    def _all(self, kind: OperationKind, nbytes: int) -> Operation:
        return Operation(kind, micro=self.micro, nbytes=nbytes, ranks=self.plan.mesh.devices)

    def _micro_batch(self, last: bool) -> Iterator[Operation]:
        self.done.clear()
        self.forwarded.clear()
        self.returned.clear()
        for i, (phase, unit, section) in enumerate(self.sections):
            yield from self._before(phase, unit, last)
            if phase == "chunk":
                yield from self._chunks(i)
            else:
                yield self._compute(phase, unit, section)

    def _compute(self, phase: Phase, unit: str, section: Section, shape: tuple[int, int] | None = None) -> Operation:
        near = self.near.get(unit, ("", ""))
        return Operation("compute", unit, self.micro, phase, section=section, near=near, shape=shape or self.shape)

    def _chunks(self, i: int) -> Iterator[Operation]:
        """All chunks of the loss, with the next phase between any two; the caller issues it after the last."""
        sizes = chunks(self.plan, self.description, self.engine)
        for j, size in enumerate(sizes):
            yield self._compute(*self.sections[i], shape=(1, size))
            if j < len(sizes) - 1:
                yield self._compute(*self.sections[i + 1])

    def _before(self, phase: Phase, unit: str, last: bool) -> Iterator[Operation]:
        """The operations of sharding at the start of a phase."""
        if phase == "forward":
            yield from self._gather(unit)
            yield from self._unpack(unit, forward=True)
            for other in self.ahead.get(unit, []):
                yield from self._gather(other)
        elif phase == "leave":
            yield from self._forget()
            yield from self._leave(unit)
            yield from self._spill_activations(unit)
        elif phase == "loss":
            if self.held is not None:
                yield self._op("release", self.held)
                self.held = None
            yield from self._forget(everything=True)
        elif phase == "backward":
            yield from self._gather(unit)
            yield from self._unpack(unit, forward=False)
            yield from self._return_activations(unit)
            yield from self._prefetch_backward(unit)
        elif phase == "done":
            yield from self._done(unit, last)
        elif phase == "end":
            yield from self._end(last)

    def _op(self, kind: OperationKind, unit: str, **more: int) -> Operation:
        return Operation(kind, unit, self.micro, **more)  # type: ignore[arg-type]

    def _gather(self, unit: str) -> Iterator[Operation]:
        if unit in self.gathered or unit in self.pending:
            return
        yield from self._await(unit)
        yield from self._fetch(unit)
        self.pending.add(unit)
        sizes = self.units[unit]
        if sizes.world == 1:
            return
        ranks = int(sizes.reshard) if unit in self.parts else sizes.world
        yield from self._scale(sizes)
        wire = self.plan.wire
        sent = ranks * wire.message_bytes(*(n // ranks for n in sizes.gathered)) if wire.gather != "plain" else 0
        yield self._op(
            "gather", unit, nbytes=sum(sizes.gathered_bytes(item(self.plan.precision.compute))), ranks=ranks, sent=sent
        )

    def _scale(self, sizes: UnitSizes) -> Iterator[Operation]:
        """Before the first gather in float8, all ranks agree on the scales of all such weights, each of 4 bytes."""
        if sizes.float8 and not self.scaled:
            self.scaled = True
            nbytes = 4 * sum(len(s.float8) for s in self.units.values())
            yield Operation("all_reduce", micro=self.micro, nbytes=nbytes, ranks=sizes.world)

    def _unpack(self, unit: str, forward: bool) -> Iterator[Operation]:
        if unit not in self.pending:
            return
        yield self._op("unpack", unit)
        if forward and self.held is not None:  # only now: a local variable of FSDP2 holds it until here
            yield self._op("release", self.held)
            self.held = None
        self.pending.discard(unit)
        self.parts.discard(unit)
        self.gathered.add(unit)
        if self.units[unit].world == 1:
            return
        if forward:  # until the next unit's, so that the two overlap
            self.held = unit
        else:
            yield self._op("release", unit)

    def _leave(self, unit: str) -> Iterator[Operation]:
        reshard = self.units[unit].reshard
        self.forwarded.append(unit)
        if reshard is False:
            return
        self.gathered.discard(unit)
        if reshard is True:
            yield self._op("free", unit)
        else:
            self.parts.add(unit)
            yield self._op("keep", unit, ranks=int(reshard))

    def _prefetch_backward(self, unit: str) -> Iterator[Operation]:
        if self.back.get(unit):
            for other in self.back[unit]:
                yield from self._gather(other)
        elif (i := self.forwarded.index(unit)) > 0:
            yield from self._gather(self.forwarded[i - 1])

    def _done(self, unit: str, last: bool) -> Iterator[Operation]:
        """The unit's gradients are complete: accumulate or reduce them, and free its parameters."""
        self.done.add(unit)
        sizes = self.units[unit]
        waits = not last and ((sizes.keeps and self.adds_up_whole) or self.plan.batch.sync == "last")
        if unit in self.waiting:
            yield self._op("accumulate", unit)
        if unit in self.gathered and (last or not sizes.keeps):
            self.gathered.discard(unit)
            yield self._op("free", unit)
        if waits:
            if sizes.trained and unit not in self.waiting:
                yield Operation("accumulate", unit, self.micro, first=True)
                self.waiting.add(unit)
            return
        if self.reducing is not None:
            yield self._op("drain", self.reducing)
            self.reducing = None
        if sizes.trained:
            yield from self._reduce(unit, sizes)
            if last:
                yield from self._forget()
                yield from self._after_reduction(sizes)

    def _reduce(self, unit: str, sizes: UnitSizes) -> Iterator[Operation]:
        elements = sum(sizes.gathered[i] for i in sizes.trained)
        nbytes = elements * item(self.plan.precision.reduce)
        fresh = unit not in self.sharded_grads
        quantized = self.plan.wire.reduce != "plain" and sizes.world > 1
        sent = sizes.world * self.plan.wire.message_bytes(*(sizes.shards[i] for i in sizes.trained)) if quantized else 0
        yield Operation("reduce", unit, self.micro, nbytes=nbytes, ranks=sizes.world, sent=sent, first=fresh)
        if sizes.copies > 1:
            yield self._op("all_reduce", unit, nbytes=nbytes // sizes.world, ranks=sizes.copies)
        yield Operation("settle", unit, self.micro, first=fresh)
        self.sharded_grads.add(unit)
        self.waiting.discard(unit)
        self.reducing = unit

    def _end(self, last: bool) -> Iterator[Operation]:
        """The end of backward: units whose inputs need no gradient are done only now."""
        for unit in sorted(self.order, key=lambda n: n != "root"):
            if unit not in self.done:
                yield from self._done(unit, last)
        for unit in list(self.pending):
            self.pending.discard(unit)
            if self.units[unit].world > 1:
                yield self._op("release", unit)
        if self.reducing is not None:
            yield self._op("drain", self.reducing)
            self.reducing = None
        yield from self._forget(everything=True)

    # -- offload -------------------------------------------------------------------------------------------

    def _saved(self) -> dict[str, tuple[Saved, ...]]:
        """The activations that leave the device, by unit."""
        if not self.leads:
            return {}
        make = lambda: saved_tensors(self.sections, self.near, *self.shape)
        found = remembered(self.description, "saved", self.sections, self.shape, make)
        return {name: found[name] for name in self.leads if found.get(name)}

    def _move(self, kind: OperationKind, what: Payload, unit: str, nbytes: int = 0) -> Operation:
        saved, home = self.saved.get(unit, ()) if what == "activations" else (), self.units[unit].home
        place = home.params if what == "params" else home.activations if what == "activations" else home.optimizer
        nbytes = nbytes or sum(s.nbytes for s in saved)
        return Operation(kind, unit, self.micro, nbytes=nbytes, what=what, place=place, saved=saved)

    def _await(self, unit: str) -> Iterator[Operation]:
        """Wait for the update of the previous step, before the first use of an offloaded unit's parameters."""
        if self.units[unit].away and unit not in self.awaited:
            self.awaited.add(unit)
            yield self._move("await", "update", unit)

    def _fetch(self, unit: str) -> Iterator[Operation]:
        """Fetch the shard for a gather, unless `reshard` ranks kept the parameters."""
        sizes = self.units[unit]
        if sizes.home.params != "device" and unit not in self.parts:
            yield self._move("fetch", "params", unit, sum(sizes.shards) * item(self.plan.precision.compute))

    def _after_reduction(self, sizes: UnitSizes) -> Iterator[Operation]:
        """The gradient of the step is complete: update now, or spill it if updates wait for the norm."""
        if not self.late:
            yield from self._update(sizes)
        elif sizes.home.optimizer != "device":
            self.spilled.append(("gradients", sizes.name, 1))
            yield self._move("spill", "gradients", sizes.name)

    def _update(self, sizes: UnitSizes) -> Iterator[Operation]:
        if sizes.away and sizes.trained:
            yield self._op("update", sizes.name)

    def _spill_activations(self, unit: str) -> Iterator[Operation]:
        if unit in self.saved:
            self.spilled.append(("activations", unit, self.leads[unit]))
            yield self._move("spill", "activations", unit)

    def _forget(self, *, everything: bool = False) -> Iterator[Operation]:
        """Free what was spilled, after as many units as its copy is given. `everything`: at once."""
        copying = [(what, unit, 0 if everything else left - 1) for what, unit, left in self.spilled]
        self.spilled = [spilled for spilled in copying if spilled[2] > 0]
        for what, unit, left in copying:
            if left <= 0:
                yield self._move("forget", what, unit)

    def _return_activations(self, unit: str) -> Iterator[Operation]:
        """Fetch activations of the units whose backward is near enough, and wait for those of this unit."""
        place = self.forwarded.index(unit)
        for i in range(place, -1, -1):
            other = self.forwarded[i]
            if other in self.saved and other not in self.returned and place - i <= self.leads[other]:
                self.returned.add(other)
                yield self._move("fetch", "activations", other)
        if unit in self.saved:
            yield self._move("await", "activations", unit)
