"""Allocations and frees of one step on one rank, in the order in which they happen.

Turns the operations of a schedule into a tape: what is allocated and freed, of which kind, on which stream.
Knows FSDP2's buffers; knows nothing of allocators.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal

from fullshard.model.costs import Section
from fullshard.model.description import Description
from fullshard.model.kernel_workspace import HIDDEN, WORKSPACE
from fullshard.plan import Place, Plan
from fullshard.planner.step.offload_bytes import SHARE, OffloadBytes, WaitingGradients
from fullshard.planner.step.saved_activations import SpilledBytes
from fullshard.planner.step.schedule import Operation
from fullshard.planner.step.unit_sizes import Group, groups, item

Term = Literal[
    "params",
    "optimizer",
    "buffers",
    "gradients",
    "activations",
    "loss",
    "gathered",
    "whole gradients",
    "reduce",
    "workspace",
    "batch",
    "staging",
    "fetched",
]
COMPUTE, GATHER, REDUCE, ALL_REDUCE, TRANSFER = 0, 1, 2, 3, 4  # FSDP's streams and ours; each has its own memory pool


@dataclass
class Tape:
    """What happens to memory. Entry i allocates `deltas[i]` bytes, or frees them if negative."""

    deltas: list[int] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)  # which allocation; the same number when it is freed
    streams: list[int] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)  # index of the operation that did it
    alive: dict[tuple[str, str], tuple[int, int, Term, int]] = field(default_factory=dict)
    count: int = 0
    folds: ClassVar[bool] = False  # whether it takes a section's own temporaries as one rise

    def allocate(self, owner: str, tensor: str, nbytes: int, term: Term, stream: int, operation: int) -> None:
        if nbytes <= 0:
            return
        self.free(owner, tensor, operation)
        self.count += 1
        self.alive[owner, tensor] = (self.count, nbytes, term, stream)
        self._write(nbytes, term, self.count, stream, operation)

    def free(self, owner: str, tensor: str, operation: int) -> None:
        found = self.alive.pop((owner, tensor), None)
        if found is not None:
            number, nbytes, term, stream = found
            self._write(-nbytes, term, number, stream, operation)

    def rename(self, owner: str, tensor: str, name: str, term: Term, operation: int) -> None:
        """The same memory under another name and term."""
        number, nbytes, old, stream = self.alive.pop((owner, tensor))
        self.alive[owner, name] = (number, nbytes, term, stream)
        if old != term:  # two entries of nothing, for those who add up terms
            self.deltas += [-nbytes, nbytes]
            self.terms += [old, term]
            self.tensors += [0, 0]
            self.streams += [stream, stream]
            self.operations += [operation, operation]

    def repeat(self, start: int, names: dict[int, int]) -> None:
        """Once more all that happened since entry `start`, if it left alive what it found; `names`: of what was alive then,
        the number that the same has now."""
        first = max(self.tensors[:start], default=0)
        shift = self.count - first
        self.deltas += self.deltas[start:]
        self.terms += self.terms[start:]
        self.tensors += [n + shift if n > first else names.get(n, n) for n in self.tensors[start:]]
        self.streams += self.streams[start:]
        self.operations += self.operations[start:]
        self.count += shift

    def rise(self, nbytes: int) -> None:
        """So much more, and at once less again. Only a tape that folds sections is told so."""
        assert self.folds

    def _write(self, delta: int, term: Term, number: int, stream: int, operation: int) -> None:
        self.deltas.append(delta)
        self.terms.append(term)
        self.tensors.append(number)
        self.streams.append(stream)
        self.operations.append(operation)


class Replay:
    """Plays operations onto a tape."""

    def __init__(self, plan: Plan, description: Description, slots: int, *, clip: bool = True, cpu_share: float = SHARE):
        self.plan, self.tape, self.slots = plan, Tape(), slots
        self.groups = groups(plan, description)
        self.away = OffloadBytes(plan, self.groups, slots, clip=clip, cpu_share=cpu_share)
        self.waiting = WaitingGradients(self.away)
        self.spilled: SpilledBytes[Term] = SpilledBytes()  # activations that are away
        p = plan.precision
        self.compute, self.reduce, self.master = item(p.compute), item(p.reduce), item(p.master)
        self.rows, self.tokens = plan.batch.micro_batch, plan.batch.sequence
        self.named: dict[str, list[tuple[str, int]]] = {}  # a unit's gradients
        self.at = 0
        self.last = ""  # the gradient that a reduction holds longest

    def play(self, operations: Iterable[Operation]) -> None:
        """One step."""
        self.at = 0
        self._batch()
        for operation in operations:
            getattr(self, f"_{operation.kind}")(operation)
            self.at += 1
        for name, tensor in [key for key in self.tape.alive if key[0] == "batch"]:
            self._drop(name, tensor)

    def _add(self, owner: str, tensor: str, nbytes: int, term: Term, stream: int = COMPUTE) -> None:
        self.tape.allocate(owner, tensor, nbytes, term, stream, self.at)

    def _drop(self, owner: str, tensor: str) -> None:
        self.tape.free(owner, tensor, self.at)

    # -- what rests ------------------------------------------------------------------------------------------

    def rest(self, description: Description) -> None:
        """Parameters and buffers, each tensor an allocation of its own."""
        for unit in self.plan.units:
            group = self.groups[unit.name]
            if unit.home.params == "device":
                for p, n in zip(group.parameters, group.shards, strict=True):
                    self._add("rest", f"param:{p.name}", n * (self.compute if group.away else self.master), "params")
            if group.away and unit.home.optimizer == "device":  # master and moments, apart from the shard
                self._add("rest", f"state:{unit.name}", self.away.state_of(group), "optimizer")
        for slot, nbytes in enumerate(self.away.staging()):
            self._add("rest", f"staging{slot}", nbytes, "staging")
        for b in [*description.buffers, *[b for u in description.units for b in u.buffers]]:
            self._add("rest", f"buffer:{b.name}", b.nbytes, "buffers")

    def states(self) -> None:
        """Optimizer state; made when the first step updates."""
        for unit in self.plan.units:
            group = self.groups[unit.name]
            for i in () if group.away else group.trained:
                name = group.parameters[i].name
                if ("rest", f"state0:{name}") in self.tape.alive:
                    continue
                if self.slots == 2:  # Adam counts its steps, on the device, a tensor for each parameter
                    self._add("rest", f"step:{name}", 4, "optimizer")
                for slot in range(self.slots):
                    self._add("rest", f"state{slot}:{name}", group.shards[i] * self.master, "optimizer")

    def left_over(self) -> None:
        """Gradients of the step before whose updates are still under way; the first units' came last."""
        for group in reversed(self.groups.values()):
            if group.away and group.name in self.away.staying:
                self._add(group.name, "gradient", group.moving * self.away.gradient, "gradients", REDUCE)
                self._linger(group.name)

    def workspaces(self, *threads: str) -> None:
        """cuBLAS's: one for the thread that runs forward, one for autograd's."""
        for thread in threads or ("forward", "backward"):
            if ("workspace", thread) not in self.tape.alive:
                self._add("workspace", thread, WORKSPACE, "workspace")

    def _batch(self) -> None:
        """Token ids and labels of all micro-batches, int64."""
        for micro in range(self.plan.batch.accumulate):
            for name in ("input_ids", "labels"):
                self._add("batch", f"{name}{micro}", 8 * self.rows * self.tokens, "batch")

    # -- operations ------------------------------------------------------------------------------------------

    def _compute(self, op: Operation) -> None:
        section = op.section
        assert section is not None
        rows, tokens = (1, op.tokens) if op.moment == "chunk" else (self.rows, self.tokens)
        thread = "backward" if op.moment in ("backward", "done", "end") else "forward"
        owners = {"": op.unit, "<": op.near[0], ">": op.near[1], "/": ""}
        term: Term = "loss" if op.moment in ("chunk", "chunked", "loss") or not op.unit else "activations"
        allocate, free, at = self.tape.allocate, self.tape.free, self.at  # looked up once: there are many
        events = _folded if self.tape.folds else _evaluated
        for action, tensor, unit, nbytes in events(section, rows, tokens):
            owner = owners.get(unit, unit)
            if action == "allocate":
                allocate(owner, tensor, nbytes, "whole gradients" if tensor.startswith("grad:") else term, COMPUTE, at)
            elif action == "free":
                free(owner, tensor, at)
                self.spilled.pop((owner, tensor))
            elif action == "rise":
                self.tape.rise(nbytes)
            elif action == "multiply":
                self.workspaces(thread)
            elif (owner, f"whole:{tensor}") in self.tape.alive:
                self._drop(owner, tensor)  # added to the sum that was there

    def _gather(self, op: Operation) -> None:
        nbytes = op.nbytes
        if self._casts(self.groups[op.unit]):
            self._add(op.unit, "flat", nbytes // op.ranks, "gathered", GATHER)
        self._add(op.unit, "buffer", nbytes, "gathered", GATHER)
        self._drop(op.unit, "flat")
        self._drop(op.unit, "shard")

    def _unpack(self, op: Operation) -> None:
        group = self.groups[op.unit]
        if group.world == 1:
            self._cast(group)
            self._drop(op.unit, "shard")
            return
        for i, n in enumerate(group.whole):
            self._add(op.unit, f"param{i}", n * self.compute, "gathered")
        for i in range(len(group.whole)):
            self._drop(op.unit, f"part{i}")

    def _casts(self, group: Group) -> bool:
        """Whether shards are in another dtype than what is gathered."""
        return self.compute != self.master and not group.away

    def _cast(self, group: Group) -> None:
        """One rank alone copies each parameter, through a cast if the dtypes differ."""
        for i, n in enumerate(group.shards):
            if self._casts(group):
                self._add(group.name, f"cast{i % 2}", n * self.compute, "gathered")
                self._drop(group.name, f"cast{(i + 1) % 2}")
            self._add(group.name, f"param{i}", n * self.compute, "gathered")
        for i in (0, 1):
            self._drop(group.name, f"cast{i}")

    def _release(self, op: Operation) -> None:
        self._drop(op.unit, "buffer")

    def _free(self, op: Operation) -> None:
        for i in range(len(self.groups[op.unit].whole)):
            self._drop(op.unit, f"param{i}")

    def _keep(self, op: Operation) -> None:
        for i, n in enumerate(self.groups[op.unit].whole):
            self._add(op.unit, f"part{i}", n * self.compute // op.ranks, "gathered")
            self._drop(op.unit, f"param{i}")

    def _accumulate(self, op: Operation) -> None:
        """Whole gradients wait in the reduce dtype."""
        group = self.groups[op.unit]
        for tensor, elements in self._gradients(group):
            if (op.unit, tensor) not in self.tape.alive:
                continue
            if self.reduce == self.compute:
                self.tape.rename(op.unit, tensor, f"whole:{tensor}", "whole gradients", self.at)
                continue
            if op.first:
                self._add(op.unit, f"sum:{tensor}", elements * self.reduce, "whole gradients")
            self._drop(op.unit, tensor)

    def _gradients(self, group: Group) -> list[tuple[str, int]]:
        """Names and elements of a unit's gradients; names are relative to the unit's first module."""
        if group.name not in self.named:
            unit = next(u for u in self.plan.units if u.name == group.name)
            prefix, trained = f"{unit.modules[0]}.", (group.parameters[i] for i in group.trained)
            self.named[group.name] = [(f"grad:{p.name.removeprefix(prefix)}", p.numel) for p in trained]
        return self.named[group.name]

    def _reduce(self, op: Operation) -> None:
        group = self.groups[op.unit]
        self._add(op.unit, "reduce input", op.nbytes, "reduce")
        (table,) = HIDDEN["chunk_cat"](len(group.trained), *[group.shards[i] * self.reduce for i in group.trained])
        self._add(op.unit, "table", table, "reduce")
        self._drop(op.unit, "table")
        names = [tensor for tensor, _ in self._gradients(group)]
        last = names.pop() if op.ranks > 1 else ""  # the loop variable of FSDP's holds it until the end
        self._drop_gradients(op.unit, names)
        shard = op.nbytes // op.ranks
        if self.reduce == self._kept(group) and op.first:
            self._add(op.unit, "gradient", shard, "gradients", REDUCE)
        else:
            self._add(op.unit, "reduced", shard, "reduce", REDUCE)
        self.last = last

    def _kept(self, group: Group) -> int:
        """Bytes of an element of a gradient that waits for the update."""
        return self.away.gradient if group.away else self.master

    def _drop_gradients(self, unit: str, names: list[str]) -> None:
        for tensor in names[::-1]:  # as a list lets go of its items
            for name in (tensor, f"sum:{tensor}", f"whole:{tensor}"):
                self._drop(unit, name)

    def _all_reduce(self, op: Operation) -> None:
        """In place."""

    def _settle(self, op: Operation) -> None:
        """Reduced gradients, in the dtype that they are kept in, become the shard or are added to it."""
        group = self.groups[op.unit]
        kept = self._kept(group)
        stream = ALL_REDUCE if group.copies > 1 else REDUCE
        if self.reduce != kept:
            self._add(op.unit, "gradient" if op.first else "cast", group.moving * kept, "gradients", stream)
        if self.reduce == kept or group.copies == 1:  # else the all-reduce's input is held until the end
            self._drop(op.unit, "reduced")
        self._drop(op.unit, "cast")
        self._drop_gradients(op.unit, [self.last])

    def _drain(self, op: Operation) -> None:
        self._drop(op.unit, "reduce input")

    def _norm(self, op: Operation) -> None:
        """A few scalars for each parameter."""
        for name in self.groups:
            self._drop(name, "reduced")

    def _update(self, op: Operation) -> None:
        """Fused: in place, but for the first."""
        if not op.unit:
            self.states()
        elif not self.away.late:
            self._linger(op.unit)

    def _linger(self, unit: str) -> None:
        """A gradient waits for its update; backward goes on when others' are gone."""
        for gone in self.waiting.add(unit):
            self._drop(gone, "gradient")

    def _zero(self, op: Operation) -> None:
        for name, group in self.groups.items():
            if not group.away:
                self._drop(name, "gradient")

    # -- what rests away -------------------------------------------------------------------------------------

    def _await(self, op: Operation) -> None:
        if op.what == "update":
            self._drop(op.unit, "gradient")
            self.waiting.drop(op.unit)
        self._return(op, "disk")

    def _fetch(self, op: Operation) -> None:
        if op.what == "params":
            self._add(op.unit, "shard", op.nbytes, "fetched", TRANSFER)
        self._return(op, "host")

    def _return(self, op: Operation, place: Place) -> None:
        """Activations come to the device: from the host ahead, from disk when they are wanted."""
        for s in op.saved if self.groups[op.unit].home.activations == place else ():
            if found := self.spilled.pop((s.owner, s.tensor)):
                self._add(s.owner, s.tensor, *found, TRANSFER)

    def _spill(self, op: Operation) -> None:
        """Copied into pinned memory that is there."""

    def _forget(self, op: Operation) -> None:
        if op.what == "gradients" and op.unit not in self.away.staying:
            self._drop(op.unit, "gradient")
        if op.saved:
            keys = [(s.owner, s.tensor) for s in op.saved]
            gone = {key: found[1:3] for key in keys if (found := self.tape.alive.get(key))}
            self.spilled.add(op.unit, self.groups[op.unit].home.activations, gone)
            for key in gone:
                self._drop(*key)


@lru_cache(maxsize=4096)
def _evaluated(section: Section, rows: int, tokens: int) -> tuple[tuple[str, str, str, int], ...]:
    """Events with their bytes; a kernel's several temporaries one by one."""
    found: list[tuple[str, str, str, int]] = []
    several: dict[str, int] = {}
    for e in section.events:
        if e.rule:
            sizes = e.sizes(rows, tokens)
            several[e.tensor] = len(sizes)
            found += [("allocate", f"{e.tensor}.{i}", e.unit, n) for i, n in enumerate(sizes)]
        elif e.tensor in several:
            found += [("free", f"{e.tensor}.{i}", e.unit, 0) for i in range(several.pop(e.tensor))][::-1]
        else:
            found.append((e.action, e.tensor, e.unit, e.sizes(rows, tokens)[0] if e.size else 0))
    return tuple(found)


@lru_cache(maxsize=4096)
def _folded(section: Section, rows: int, tokens: int) -> tuple[tuple[str, str, str, int], ...]:
    """The same, where tensors that are born and die within the section are but the rise that they cause together
    between two events of others."""
    events = _evaluated(section, rows, tokens)
    last = {e[1]: i for i, e in enumerate(events) if e[0] == "free" and not e[2]}
    local: dict[str, int] = {}  # rounded bytes of those alive
    found: list[tuple[str, str, str, int]] = []
    now = most = 0
    for i, event in enumerate(events):
        action, tensor, unit, nbytes = event
        if not unit and action == "allocate" and tensor[:1].isdigit() and last.get(tensor, -1) > i and tensor not in local:
            local[tensor] = nbytes // -512 * -512
            now += local[tensor]
            most = max(most, now)
        elif not unit and action == "free" and tensor in local:
            now -= local.pop(tensor)
        else:
            found += [("rise", "", "", most)] if most else []
            found.append(event)
            most = now
    return tuple([*found, ("rise", "", "", most)] if most else found)
