"""The ordered operations of one step: a pure function of the plan.

Follows what FSDP2 does at the doors of each unit: gather and prefetch before it computes, free after, reduce
when its gradients are there. Says what happens and in which order; what it takes is said by `memory`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fullshard.errors import FullshardError
from fullshard.model.costs import Costs, Moment, Section
from fullshard.model.description import Description
from fullshard.plan import Plan
from fullshard.planner.step.offload_bytes import waits_for_norm
from fullshard.planner.step.phases import moments, neighbours
from fullshard.planner.step.saved_activations import Saved, leads, saved_tensors
from fullshard.planner.step.unit_sizes import Group, groups, item

# on_torch/loss_chunks.py: a chunk's logits in the compute dtype, in float32, and their gradient stay under the budget.
CHUNK_BUDGET, CHUNK_BYTES, CHUNK_TILE = 1 << 31, 8, 256

Kind = Literal[
    "compute",  # a section of the trace
    "gather",  # issue the all-gather of a unit's shards
    "unpack",  # wait for it, and copy the parameters out of its buffer
    "release",  # drop the all-gather's buffer
    "free",  # drop gathered parameters
    "keep",  # drop them but for a part of fewer ranks
    "accumulate",  # keep whole gradients for the next micro-batch
    "reduce",  # reduce whole gradients to shards
    "all_reduce",  # reduce shards over the copies
    "drain",  # drop a reduction's input
    "settle",  # drop what a unit's reduction still holds
    "fetch",  # bring a unit's shard, or its activations, to the device; those on disk to the host
    "spill",  # send its activations, or the gradient of what the CPU updates, to the host
    "forget",  # drop on the device what was spilled
    "await",  # wait until the unit's update of the step before is done, or its activations are back, from disk by way of
    # the host
    "norm",
    "update",  # of a unit whose state rests away; without a unit, of all others
    "zero",
]
What = Literal["", "params", "gradients", "activations", "update"]


@dataclass(frozen=True)
class Operation:
    """`nbytes`: of the whole tensor that a collective works on. `section`: what a compute does."""

    kind: Kind
    unit: str = ""
    micro: int = 0
    moment: Moment | Literal[""] = ""
    nbytes: int = 0
    ranks: int = 1
    section: Section | None = None
    near: tuple[str, str] = ("", "")  # the units before and after, for the tensors that pass between them
    tokens: int = 0  # of a chunk of the loss
    first: bool = False  # of a reduction: whether no gradient shard is there yet
    what: What = ""  # of a transfer or a wait
    saved: tuple[Saved, ...] = ()  # the activations that are spilled, forgotten or fetched


def schedule(
    plan: Plan, description: Description, *, loss: str = "chunked", micros: tuple[int, ...] = (), clip: bool = True
) -> tuple[Operation, ...]:
    """One whole step. `micros`: only these micro-batches, for those who know that the others are alike. `clip`: whether
    updates wait for the gradient norm."""
    return tuple(_Step(plan, description, loss, clip).run(micros or tuple(range(plan.batch.accumulate))))


def chunks(vocabulary: int, tokens: int) -> list[int]:
    """Tokens of each chunk of the chunked loss."""
    chunk = largest_chunk(vocabulary)
    return [min(chunk, tokens - i) for i in range(0, tokens, chunk)]


def largest_chunk(vocabulary: int) -> int:
    """Tokens of a chunk of the chunked loss, where there are enough, as `on_torch.chunked` cuts them."""
    chunk = max(1, CHUNK_BUDGET // (CHUNK_BYTES * vocabulary))
    return chunk - (chunk % CHUNK_TILE if chunk > CHUNK_TILE else 0)


def costs_of(plan: Plan, description: Description, loss: str) -> Costs:
    """The description's costs; refuses what they do not tell."""
    if description.costs is None:
        raise FullshardError("this description has no costs; describe the model with micro_batch and sequence")
    costs = description.costs.on(plan.mesh.tensor)
    costs.check(plan.batch.micro_batch, plan.batch.sequence)
    if plan.mesh.tensor > 1 and loss == "chunked" and not costs.vocabulary:
        raise FullshardError(
            f"chunked loss: mesh.tensor = {plan.mesh.tensor} splits the head; use the plain loss, or a mesh with tensor = 1"
        )
    if plan.precision.output not in (None, plan.precision.compute):
        raise FullshardError(f"precision.output = {plan.precision.output!r} cannot be predicted yet; leave it out")
    blocks = {u.name for u in description.units if u.kind == "block"}
    for unit in plan.units:
        if (unit.home.params, unit.home.optimizer) == ("disk", "device"):
            raise FullshardError(
                f"unit {unit.name}: home.params = 'disk' is not carried out with home.optimizer = 'device'; write 'disk'"
            )
        if unit.remat != "none" and unit.name not in blocks:
            raise FullshardError(f"unit {unit.name}: remat = {unit.remat!r} is predicted for blocks only; write 'none'")
    return costs


class _Step:
    """FSDP's state while the schedule is written: which units are whole, which gathers are under way."""

    def __init__(self, plan: Plan, description: Description, loss: str, clip: bool):
        costs = costs_of(plan, description, loss)
        self.plan = plan
        self.late = waits_for_norm(plan, clip)
        self.groups = groups(plan, description)
        self.moments = moments(plan, costs, loss)
        self.near = neighbours(self.moments)
        self.vocabulary = costs.vocabulary
        self.leads = leads(plan, list(self.near))
        self.saved = self._saved()
        self.awaited: set[str] = set()  # units whose update of the step before is known to be done
        self.spilled: list[tuple[What, str, int]] = []  # what is on its way to the host, for so many units more
        self.returned: set[str] = set()  # units whose activations are back
        self.order = list(self.groups)
        self.whole: set[str] = set()
        self.parts: set[str] = set()  # kept over fewer ranks after forward
        self.pending: set[str] = set()  # gathered, not unpacked
        self.held: str | None = None  # whose all-gather buffer forward still holds
        self.forwarded: list[str] = []  # units in the order of their forwards
        self.reducing: str | None = None  # whose reduction's input is still held
        self.done: set[str] = set()
        self.sharded_grads: set[str] = set()
        self.waiting: set[str] = set()  # units with whole gradients from earlier micro-batches
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
        yield self._all("all_reduce", 16)  # norm and loss
        for group in self.groups.values() if self.late else ():
            yield from self._update(group)
        yield Operation("update", micro=last)
        yield Operation("zero", micro=last)

    def _all(self, kind: Kind, nbytes: int) -> Operation:
        return Operation(kind, micro=self.micro, nbytes=nbytes, ranks=self.plan.mesh.devices)

    def _micro_batch(self, last: bool) -> Iterator[Operation]:
        self.done.clear()
        self.forwarded.clear()
        self.returned.clear()
        for i, (moment, unit, section) in enumerate(self.moments):
            yield from self._before(moment, unit, last)
            if moment == "chunk":
                yield from self._chunks(i)
            else:
                yield self._compute(moment, unit, section)

    def _compute(self, moment: Moment, unit: str, section: Section, tokens: int = 0) -> Operation:
        near = self.near.get(unit, ("", ""))
        return Operation("compute", unit, self.micro, moment, section=section, near=near, tokens=tokens)

    def _chunks(self, i: int) -> Iterator[Operation]:
        """All chunks of the loss; what follows the last comes with the next moment."""
        sizes = chunks(self.vocabulary, self.plan.batch.micro_batch * self.plan.batch.sequence)
        for j, size in enumerate(sizes):
            yield self._compute(*self.moments[i], tokens=size)
            if j < len(sizes) - 1:
                yield self._compute(*self.moments[i + 1])

    def _before(self, moment: Moment, unit: str, last: bool) -> Iterator[Operation]:
        """What sharding does at a moment."""
        if moment == "forward":
            yield from self._gather(unit)
            yield from self._unpack(unit, forward=True)
            for other in self.ahead.get(unit, []):
                yield from self._gather(other)
        elif moment == "leave":
            yield from self._forget()
            yield from self._leave(unit)
            yield from self._spill_activations(unit)
        elif moment == "loss":
            if self.held is not None:
                yield self._op("release", self.held)
                self.held = None
            yield from self._forget(everything=True)
        elif moment == "backward":
            yield from self._gather(unit)
            yield from self._unpack(unit, forward=False)
            yield from self._return_activations(unit)
            yield from self._prefetch_backward(unit)
        elif moment == "done":
            yield from self._done(unit, last)
        elif moment == "end":
            yield from self._end(last)

    def _op(self, kind: Kind, unit: str, **more: int) -> Operation:
        return Operation(kind, unit, self.micro, **more)  # type: ignore[arg-type]

    def _gather(self, unit: str) -> Iterator[Operation]:
        if unit in self.whole or unit in self.pending:
            return
        yield from self._await(unit)
        yield from self._fetch(unit)
        self.pending.add(unit)
        group = self.groups[unit]
        if group.world == 1:
            return
        ranks = int(group.reshard) if unit in self.parts else group.world
        yield self._op("gather", unit, nbytes=sum(group.whole) * item(self.plan.precision.compute), ranks=ranks)

    def _unpack(self, unit: str, forward: bool) -> Iterator[Operation]:
        if unit not in self.pending:
            return
        yield self._op("unpack", unit)
        if forward and self.held is not None:  # only now: a local variable of FSDP's keeps it for that long
            yield self._op("release", self.held)
            self.held = None
        self.pending.discard(unit)
        self.parts.discard(unit)
        self.whole.add(unit)
        if self.groups[unit].world == 1:
            return
        if forward:  # until the next unit's, so that the two overlap
            self.held = unit
        else:
            yield self._op("release", unit)

    def _leave(self, unit: str) -> Iterator[Operation]:
        reshard = self.groups[unit].reshard
        self.forwarded.append(unit)
        if reshard is False:
            return
        self.whole.discard(unit)
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
        """The unit's gradients are there."""
        self.done.add(unit)
        group = self.groups[unit]
        waits = not last and (group.keeps or self.plan.batch.sync == "last")
        if unit in self.waiting:
            yield self._op("accumulate", unit)
        if unit in self.whole and (last or not group.keeps):
            self.whole.discard(unit)
            yield self._op("free", unit)
        if waits:
            if group.trained and unit not in self.waiting:
                yield Operation("accumulate", unit, self.micro, first=True)
                self.waiting.add(unit)
            return
        if self.reducing is not None:
            yield self._op("drain", self.reducing)
            self.reducing = None
        if group.trained:
            yield from self._reduce(unit, group)
            if last:
                yield from self._forget()
                yield from self._after_reduction(group)

    def _reduce(self, unit: str, group: Group) -> Iterator[Operation]:
        elements = sum(group.whole[i] for i in group.trained)
        nbytes = elements * item(self.plan.precision.reduce)
        fresh = unit not in self.sharded_grads
        yield Operation("reduce", unit, self.micro, nbytes=nbytes, ranks=group.world, first=fresh)
        if group.copies > 1:
            yield self._op("all_reduce", unit, nbytes=nbytes // group.world, ranks=group.copies)
        yield Operation("settle", unit, self.micro, first=fresh)
        self.sharded_grads.add(unit)
        self.waiting.discard(unit)
        self.reducing = unit

    def _end(self, last: bool) -> Iterator[Operation]:
        """Units whose inputs need no gradient are done only when everything is."""
        for unit in sorted(self.order, key=lambda n: n != "root"):
            if unit not in self.done:
                yield from self._done(unit, last)
        for unit in list(self.pending):
            self.pending.discard(unit)
            if self.groups[unit].world > 1:
                yield self._op("release", unit)
        if self.reducing is not None:
            yield self._op("drain", self.reducing)
            self.reducing = None
        yield from self._forget(everything=True)

    # -- what rests away -------------------------------------------------------------------------------------

    def _saved(self) -> dict[str, tuple[Saved, ...]]:
        """Activations that move, by unit."""
        batch = self.plan.batch
        found = saved_tensors(self.moments, self.near, batch.micro_batch, batch.sequence) if self.leads else {}
        return {name: found[name] for name in self.leads if found.get(name)}

    def _move(self, kind: Kind, what: What, unit: str, nbytes: int = 0) -> Operation:
        saved = self.saved.get(unit, ()) if what == "activations" else ()
        return Operation(kind, unit, self.micro, nbytes=nbytes or sum(s.nbytes for s in saved), what=what, saved=saved)

    def _await(self, unit: str) -> Iterator[Operation]:
        """Before a unit's parameters are used for the first time in a step."""
        if self.groups[unit].away and unit not in self.awaited:
            self.awaited.add(unit)
            yield self._move("await", "update", unit)

    def _fetch(self, unit: str) -> Iterator[Operation]:
        """The shard, for one gather; what is kept of an earlier one needs none."""
        group = self.groups[unit]
        if group.home.params != "device" and unit not in self.parts:
            yield self._move("fetch", "params", unit, sum(group.shards) * item(self.plan.precision.compute))

    def _after_reduction(self, group: Group) -> Iterator[Operation]:
        """The gradient of the whole step is there."""
        if not self.late:
            yield from self._update(group)
        elif group.home.optimizer != "device":
            self.spilled.append(("gradients", group.name, 1))
            yield self._move("spill", "gradients", group.name)

    def _update(self, group: Group) -> Iterator[Operation]:
        if group.away and group.trained:
            yield self._op("update", group.name)

    def _spill_activations(self, unit: str) -> Iterator[Operation]:
        if unit in self.saved:
            self.spilled.append(("activations", unit, self.leads[unit]))
            yield self._move("spill", "activations", unit)

    def _forget(self, *, everything: bool = False) -> Iterator[Operation]:
        """Another unit has computed; what was spilled long enough before it is on the host."""
        flying = [(what, unit, 0 if everything else left - 1) for what, unit, left in self.spilled]
        self.spilled = [spilled for spilled in flying if spilled[2] > 0]
        for what, unit, left in flying:
            if left <= 0:
                yield self._move("forget", what, unit)

    def _return_activations(self, unit: str) -> Iterator[Operation]:
        """This unit's are waited for; those of units that are as near as their copies need are sent for."""
        place = self.forwarded.index(unit)
        for i in range(place, -1, -1):
            other = self.forwarded[i]
            if other in self.saved and other not in self.returned and place - i <= self.leads[other]:
                self.returned.add(other)
                yield self._move("fetch", "activations", other)
        if unit in self.saved:
            yield self._move("await", "activations", unit)
