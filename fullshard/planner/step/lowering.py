"""What each operation of a schedule does: the one place where world size, homes, dtypes and wire of a plan are weighed.

Knows the buffers of FSDP2. Knows nothing of allocators and lanes. An axis or a choice that changes what an operation allocates,
sends or computes says so in the method of that operation's kind.
"""

from collections.abc import Iterator
from itertools import chain

from fullshard.model.kernel_workspaces import WORKSPACES
from fullshard.plan.plan import Plan
from fullshard.planner.step.begin_events import states
from fullshard.planner.step.effects import (
    ALL_REDUCE,
    GATHER,
    REDUCE,
    TRANSFER,
    Allocate,
    AllocateBeside,
    AllocateRow,
    Collective,
    Effects,
    Event,
    Free,
    FreeAll,
    FreeRow,
    Hooks,
    KernelWork,
    Leave,
    MessagePasses,
    Rate,
    Rename,
    ReplaceRow,
    Return,
    Row,
    RunSection,
    Term,
)
from fullshard.planner.step.offload_bytes import OffloadBytes, WaitingGradients
from fullshard.planner.step.quantized_wire import Quantization, quantized_gather, quantized_reduce
from fullshard.planner.step.schedule import Operation
from fullshard.planner.step.unit_sizes import UnitSizes, item, scaled

LOSS_ROWS = 4 << 22  # bytes of the rows that torch's softmax of the chunked loss works on at a time, in fp32
NOTHING = Effects()
LoweredStep = list[tuple[Operation, Effects]]


class Lowering:
    """Lowers the operations of one step, in their order. `gpu`: whether a GPU computes."""

    def __init__(self, plan: Plan, away: OffloadBytes, *, gpu: bool):
        self.plan, self.away, self.units, precision = plan, away, away.groups, plan.precision
        self.compute, self.reduce, self.master = item(precision.compute), item(precision.reduce), item(precision.master)
        self.gather_passes = quantized_gather(plan.wire, self.compute, gpu=gpu)
        self.reduce_passes = quantized_reduce(plan.wire, self.reduce, gpu=gpu)
        self.resident = [sizes for sizes in self.units.values() if not sizes.away]
        # With Adam, a GPU clips and updates resident units in one pass, unless the plan says otherwise.
        self.one_pass = gpu and bool(self.resident) and away.slots == 2 and plan.kernels.update != "torch"
        # Only that update takes gradients as they were computed.
        self.computed = self.one_pass and plan.keeps_computed_gradients
        self.modules = {u.name: u.modules[0] for u in plan.units}
        self.named: dict[str, list[tuple[str, int]]] = {}  # names and elements of a unit's gradients
        self.accumulated: set[str] = set()  # units with gradients of earlier micro-batches
        self.waiting = WaitingGradients(away)
        self.known: dict[object, Effects] = {}

    def step(self, operations: tuple[Operation, ...]) -> LoweredStep:
        """The operations of a step, each with what it does."""
        return [(op, self._lower(op)) for op in operations]

    def _lower(self, op: Operation) -> Effects:
        """What an operation does. Most do the same in every micro-batch."""
        if op.kind in ("compute", "update", "await"):
            return getattr(self, f"_{op.kind}")(op)
        last = op.micro == self.plan.batch.accumulate - 1
        key = (op.kind, op.unit, op.first, op.nbytes, op.ranks, op.what, last, op.unit in self.accumulated)
        if (found := self.known.get(key)) is None:
            found = self.known[key] = getattr(self, f"_{op.kind}")(op)
        if op.kind == "accumulate":
            self.accumulated.add(op.unit)
        elif op.kind == "reduce":
            self.accumulated.discard(op.unit)
        return found

    # -- computing and gathering -------------------------------------------------------------------------------

    def _compute(self, op: Operation) -> Effects:
        if op.phase == "chunk" and self.plan.kernels.loss == "torch":
            return Effects((Allocate(op.unit, "rows", LOSS_ROWS, "loss"), RunSection(op), Free(op.unit, "rows")))
        return Effects((RunSection(op),))

    def _gather(self, op: Operation) -> Effects:
        sizes, elements = self.units[op.unit], op.nbytes // self.compute
        shard = op.nbytes // op.ranks if self.compute != self.master and not sizes.away else 0  # cast before it is sent
        events: list[Event] = [Allocate(op.unit, "flat", shard, "gathered", GATHER)] if shard else []
        events.append(Allocate(op.unit, "buffer", op.nbytes, "gathered", GATHER))
        events += [Free(op.unit, "flat")] if shard else []
        packing = None
        if passes := self.gather_passes:
            events += self._messages(passes, op, elements // op.ranks, elements, "gathered", GATHER)
            whole = sum(sizes.gathered)
            packing = MessagePasses(passes, whole / op.ranks, whole, whole, len(sizes.shards)) if op.sent else None
        copied_in = 0 if sizes.away else sizes.held * self.master + sizes.shard_bytes(self.compute)
        collective = Collective("gather", "all_gather", op.sent or op.nbytes, op.ranks, "shard", sizes.stride, packing)
        return Effects((*events, *self._fetched(sizes)), KernelWork("copies", (("copy", copied_in),)), collective)

    def _unpack(self, op: Operation) -> Effects:
        """Out of a gather's buffer, out of offloaded shards, or in a cast of resident ones."""
        sizes, row = self.units[op.unit], self._unpacked(self.units[op.unit])
        parts = [] if isinstance(sizes.reshard, bool) else [FreeRow(op.unit, "part", row)]
        events = (AllocateRow(op.unit, "param", row, "gathered"), *parts, *self._fetched(sizes))
        cast = sizes.world == 1 and not sizes.away
        copied = sum(row) + (sizes.held * self.master if cast else sum(row))
        return Effects(events, KernelWork("copies", (("copy", copied),), self._hooks(sizes, len(sizes.gathered))))

    def _fetched(self, sizes: UnitSizes) -> list[Event]:
        """A shard that was fetched has been read."""
        return [] if sizes.home.params == "device" else [Free(sizes.name, "shard")]

    def _unpacked(self, sizes: UnitSizes) -> Row:
        """Bytes of each parameter that is ready to compute with. None where the shard is the whole, in the compute dtype."""
        is_whole = sizes.world == 1 and self.plan.mesh.tensor == 1 and sizes.away and sizes.home.params == "device"
        return () if is_whole else sizes.gathered_bytes(self.compute)

    def _release(self, op: Operation) -> Effects:
        return Effects((Free(op.unit, "buffer"),))

    def _free(self, op: Operation) -> Effects:
        return Effects((FreeRow(op.unit, "param", self.units[op.unit].gathered),))

    def _keep(self, op: Operation) -> Effects:
        sizes = self.units[op.unit]
        parts = tuple(n * self.compute // op.ranks for n in sizes.gathered)
        return Effects((ReplaceRow(op.unit, "param", sizes.gathered_bytes(self.compute), "part", parts, "gathered"),))

    # -- gradients ---------------------------------------------------------------------------------------------

    def _accumulate(self, op: Operation) -> Effects:
        """Unreduced gradients wait for the next micro-batch in the reduce dtype: the first are cast if that is wider, the others
        are added."""
        sizes = self.units[op.unit]
        moved: tuple[tuple[Rate, float], ...] = ()
        if not op.first:
            moved = (("add", sizes.gradient_elements * (self.compute + 2 * self.reduce)),)
        elif self.compute != self.reduce:
            moved = (_joined(sizes.gradient_elements, self.compute, self.reduce),)
        reduces = op.micro == self.plan.batch.accumulate - 1  # then its hooks are those of the reduction
        issued = None if reduces else self._hooks(sizes, len(sizes.trained), adding=True)
        events = [e for tensor, n in self._gradients(sizes) for e in self._waits(op, tensor, n * self.reduce)]
        return Effects(tuple(events), KernelWork("copies", moved, issued))

    def _waits(self, op: Operation, tensor: str, nbytes: int) -> Iterator[Event]:
        if self.reduce == self.compute:
            yield Rename(op.unit, tensor, f"whole:{tensor}", "whole gradients")
            return
        if op.first:
            yield AllocateBeside(op.unit, tensor, f"sum:{tensor}", nbytes, "whole gradients")
        yield Free(op.unit, tensor)

    def _gradients(self, sizes: UnitSizes) -> list[tuple[str, int]]:
        """Names and elements of a unit's gradients. Names are relative to the unit's first module."""
        if sizes.name not in self.named:
            prefix, trained = f"{self.modules[sizes.name]}.", (sizes.parameters[i] for i in sizes.trained)
            self.named[sizes.name] = [(f"grad:{p.name.removeprefix(prefix)}", p.numel) for p in trained]
        return self.named[sizes.name]

    def kept_gradient(self, sizes: UnitSizes) -> int:
        """Bytes of an element of a reduced gradient that waits for the update."""
        return self.away.gradient if sizes.away else self.compute if self.computed else self.master

    def _reduce(self, op: Operation) -> Effects:
        sizes, elements = self.units[op.unit], self.units[op.unit].gradient_elements
        read = self.reduce if op.unit in self.accumulated else self.compute
        issued = self._hooks(sizes, len(sizes.trained))
        if sizes.takes_gradients:
            as_it_is = self.computed or read == self.master
            moved = 0 if as_it_is else elements * (read + self.master)
            return Effects(tuple(self._takes(op, sizes, as_it_is)), KernelWork("copies", (("copy", moved),), issued))
        kernels = KernelWork("copies", (_joined(elements, read, self.reduce),), issued)
        return Effects(tuple(self._reduces(op, sizes)), kernels, self._reduction(op, sizes) if op.ranks > 1 else None)

    def _reduction(self, op: Operation, sizes: UnitSizes) -> Collective:
        if not op.sent:
            return Collective("reduce", "reduce_scatter", op.nbytes, op.ranks, "shard", sizes.stride)
        assert self.reduce_passes is not None
        elements = sizes.gradient_elements
        packing = MessagePasses(self.reduce_passes, elements, elements, elements / op.ranks, len(sizes.trained))
        return Collective("reduce", "all_to_all", op.sent, op.ranks, "shard", sizes.stride, packing)

    def _reduces(self, op: Operation, sizes: UnitSizes) -> Iterator[Event]:
        in_place = op.ranks == 1 and not sizes.away  # then its output is its input
        output = self._reduced_name(sizes, first=op.first, in_place=in_place)
        term: Term = "gradients" if output == "gradient" else "reduce"
        if in_place:
            yield Allocate(op.unit, output, op.nbytes, term)
        else:
            yield Allocate(op.unit, "reduce input", op.nbytes, "reduce")
        yield Allocate(op.unit, "table", _table(len(sizes.trained), scaled(sizes.trained_shards, self.reduce)), "reduce")
        yield Free(op.unit, "table")
        names = [tensor for tensor, _ in self._gradients(sizes)]
        yield self._drop_gradients(op.unit, names[:-1] if op.ranks > 1 else names)
        if not in_place:
            yield Allocate(op.unit, output, op.nbytes // op.ranks, term, REDUCE)
        if self.reduce_passes and op.ranks > 1:
            elements = op.nbytes // self.reduce
            yield from self._messages(self.reduce_passes, op, elements, elements, "reduce", REDUCE)

    def _takes(self, op: Operation, sizes: UnitSizes, as_it_is: bool) -> Iterator[Event]:
        """Each gradient becomes that of the shard, through a cast if need be, or is added to it."""
        for tensor, elements in self._gradients(sizes):
            if op.first and as_it_is:
                for name in (tensor, f"sum:{tensor}", f"whole:{tensor}"):
                    yield Rename(sizes.name, name, f"gradient:{tensor}", "gradients")
            elif op.first:
                yield Allocate(sizes.name, f"gradient:{tensor}", elements * self.master, "gradients")
            yield self._drop_gradients(sizes.name, [tensor])

    def _reduced_name(self, sizes: UnitSizes, *, first: bool, in_place: bool) -> str:
        """What a reduction's output becomes: the gradient, or a temporary that is freed when its shard is settled, or, of one
        in place, when FSDP drops the input."""
        if self.reduce == self.kept_gradient(sizes) and first:
            return "gradient"
        held = sizes.copies > 1 and self.reduce != self.kept_gradient(sizes)
        return "reduce input" if in_place and not held else "reduced"

    def _drop_gradients(self, unit: str, names: list[str]) -> FreeAll:
        """In the order in which a list frees its items."""
        summed = self.plan.batch.accumulate > 1
        every = [(name, f"sum:{name}", f"whole:{name}") if summed else (name,) for name in reversed(names)]
        return FreeAll(unit, tuple(chain.from_iterable(every)))

    def _messages(
        self, passes: Quantization, op: Operation, packed: int, unpacked: int, term: Term, stream: int
    ) -> Iterator[Event]:
        """The messages of a quantised collective, and what packing and unpacking so many elements needs for a moment, one
        parameter after the other."""
        sizes = self.units[op.unit]
        largest = max(sizes.gathered[i] for i in (sizes.trained if op.kind == "reduce" else range(len(sizes.gathered))))
        yield Allocate(op.unit, "message", op.sent * packed // unpacked, term, stream)
        yield Allocate(op.unit, "packing", passes.passing(largest * packed // unpacked, packing=True), term, stream)
        yield Free(op.unit, "packing")
        yield Allocate(op.unit, "messages", op.sent, term, stream)
        yield Allocate(op.unit, "unpacking", passes.passing(largest, packing=False), term, stream)
        yield from (Free(op.unit, name) for name in ("unpacking", "messages", "message"))

    def _all_reduce(self, op: Operation) -> Effects:
        """In place."""
        if not op.unit:
            return Effects(collective=Collective("compute", "all_reduce", op.nbytes, op.ranks))
        alone = self.units[op.unit].world == 1
        return Effects(collective=Collective("copies", "all_reduce", op.nbytes, op.ranks, "data" if alone else "replicate"))

    def _settle(self, op: Operation) -> Effects:
        """The reduced gradient becomes the gradient shard, cast if need be, or is added to it."""
        sizes = self.units[op.unit]
        if sizes.takes_gradients:
            return NOTHING
        events: list[Event] = []
        kept, stream = self.kept_gradient(sizes), ALL_REDUCE if sizes.copies > 1 else REDUCE
        if self.reduce != kept:
            name = "gradient" if op.first else "cast"
            events.append(Allocate(op.unit, name, sizes.moving * kept, "gradients", stream))
        if self.reduce == kept or sizes.copies == 1:  # else the input of the all-reduce is held until the norm
            events.append(Free(op.unit, "reduced"))
        events.append(Free(op.unit, "cast"))
        if sizes.world > 1 and sizes.trained:  # a loop variable of FSDP2 holds the last until here
            events.append(self._drop_gradients(op.unit, [self._gradients(sizes)[-1][0]]))
        return Effects(tuple(events))

    def _drain(self, op: Operation) -> Effects:
        return Effects((Free(op.unit, "reduce input"),))

    # -- the update --------------------------------------------------------------------------------------------

    def _norm(self, op: Operation) -> Effects:
        """The norm itself takes a few scalars for each parameter, which are not counted."""
        nbytes = sum(sizes.moving * self.kept_gradient(sizes) for sizes in self.units.values())
        trained = sum(len(sizes.trained) for sizes in self.units.values())
        kernels = KernelWork("norm", (("foreach", nbytes),), ("step_ops", trained / 2))
        held = [sizes.name for sizes in self.units.values() if sizes.copies > 1]  # inputs of all-reduces
        return Effects(tuple(Free(name, "reduced") for name in held), kernels)

    def _update(self, op: Operation) -> Effects:
        """A fused update is in place; the first one makes the optimizer's state."""
        if not op.unit:
            return Effects(tuple(states(self.plan, self.away)), self._updates(self.resident, clip=self.away.clip))
        waited = tuple(self.waiting.add(op.unit))
        kernels = self._updates([self.units[op.unit]], clip=False)  # only if its parameters alone are off the device
        return Effects(() if self.away.late else tuple(Free(gone, "gradient") for gone in waited), kernels, waited=waited)

    def _updates(self, units: list[UnitSizes], *, clip: bool) -> KernelWork:
        """Parameter and state in and out. Clipping by itself scales gradients first."""
        elements, tensors = sum(sizes.moving for sizes in units), sum(len(sizes.trained) for sizes in units)
        gradient = self.compute if self.computed else self.master
        moments = self.away.slots * sum(sizes.moment_bytes(self.plan.precision) for sizes in units)
        moved: list[tuple[Rate, float]] = [("update", elements * (2 * self.master + gradient) + 2 * moments)]
        if clip and not self.one_pass:
            moved.append(("foreach", elements * 2 * self.master))
        return KernelWork("update", tuple(moved), ("", tensors / 2))

    def _zero(self, op: Operation) -> Effects:
        return Effects(tuple(event for sizes in self.resident for event in self._zeroed(sizes)))

    def _zeroed(self, sizes: UnitSizes) -> Iterator[Event]:
        yield Free(sizes.name, "gradient")
        for tensor, _ in self._gradients(sizes) if sizes.takes_gradients else ():
            yield Free(sizes.name, f"gradient:{tensor}")

    def _hooks(self, sizes: UnitSizes, parameters: int, *, adding: bool = False) -> tuple[Hooks, float]:
        """The host's work for a unit's hooks. `adding`: gradients are only added."""
        return "single_rank_hooks" if sizes.world == 1 else "accumulate_hooks" if adding else "unit_hooks", parameters

    # -- offload -----------------------------------------------------------------------------------------------

    def _await(self, op: Operation) -> Effects:
        if op.what == "update":
            self.waiting.drop(op.unit)
            return Effects((Free(op.unit, "gradient"),))
        return Effects((Return(op.saved),)) if op.place == "disk" else NOTHING

    def _fetch(self, op: Operation) -> Effects:
        """Activations come back from the host ahead of use, from disk at their use."""
        if op.what == "params":
            return Effects((Allocate(op.unit, "shard", op.nbytes, "fetched", TRANSFER),))
        return Effects((Return(op.saved),)) if op.place == "host" else NOTHING

    def _spill(self, op: Operation) -> Effects:
        """The copy goes into pinned memory that is counted elsewhere."""
        return NOTHING

    def _forget(self, op: Operation) -> Effects:
        if op.what == "gradients":
            return NOTHING if op.unit in self.away.staying else Effects((Free(op.unit, "gradient"),))
        return Effects((Leave(op.unit, op.place, op.saved),))


def _joined(elements: int, read: int, written: int) -> tuple[Rate, float]:
    """A copy of gradients into a buffer. `read`, `written`: bytes of an element here and there."""
    return ("join" if read == written else "widen"), elements * (read + written)


def _table(tensors: int, row: Row) -> int:
    """Bytes of the table of a unit's reduction."""
    return WORKSPACES["chunk_cat"](tensors, *row)[0]
