"""Plays the operations of a schedule onto a tape: what is allocated and freed on one rank, of which kind, on which stream.

Knows the buffers of FSDP2. Knows nothing of allocators.
"""

from collections.abc import Iterable
from functools import lru_cache

from fullshard.model.costs import TOKENS, evaluate
from fullshard.model.description import FLOATS, Description, Tensor
from fullshard.model.kernel_workspaces import CUBLAS_WORKSPACE, WORKSPACES
from fullshard.plan.plan import HomeName, Plan, Precision
from fullshard.planner.memory.allocation_tape import ALL_REDUCE, COMPUTE, GATHER, REDUCE, TRANSFER, Tape, Term
from fullshard.planner.memory.section_events import folded_events, sized_events
from fullshard.planner.step.few_blocks import SteadyBlocks
from fullshard.planner.step.offload_bytes import SHARE, WaitingGradients, offload_bytes
from fullshard.planner.step.phases import BACKWARD, LOSS
from fullshard.planner.step.quantized_wire import Quantization
from fullshard.planner.step.saved_activations import SpilledBytes
from fullshard.planner.step.schedule import Operation
from fullshard.planner.step.unit_bytes import UnitBytes, scaled
from fullshard.planner.step.unit_sizes import UnitSizes, item

LOSS_ROWS = 4 << 22  # bytes of the rows that torch's softmax of the chunked loss works on at a time, in fp32


class Replay:
    """Plays the operations of a step onto a tape. `slots`: tensors of optimizer state for each parameter. `cublas`: whether
    cuBLAS multiplies, as it does on a GPU."""

    def __init__(
        self,
        plan: Plan,
        description: Description,
        slots: int,
        *,
        clip: bool = True,
        cpu_share: float = SHARE,
        cublas: bool = True,
    ):
        self.plan, self.tape, self.slots, self.cublas = plan, Tape(), slots, cublas
        self.away = offload_bytes(plan, description, slots, clip=clip, cpu_share=cpu_share)
        self.units = self.away.groups
        self.waiting = WaitingGradients(self.away)
        self.spilled: SpilledBytes[Term] = SpilledBytes()  # activations off the device
        self.bytes = UnitBytes(plan, self.away, gpu=cublas)  # cuBLAS stands for a GPU here too
        self.compute, self.reduce, self.master = self.bytes.compute, self.bytes.reduce, self.bytes.master
        self.inputs = description.costs.inputs if description.costs else TOKENS
        self.modules = {u.name: u.modules[0] for u in plan.units}
        self.named: dict[str, list[tuple[str, int]]] = {}  # names and elements of a unit's gradients
        self.tables: dict[str, int] = {}  # bytes of the table of a unit's reduction
        self.has_states = False
        self.at = 0
        self.last = ""  # the gradient that the current reduction holds until its end

    def play(self, operations: Iterable[Operation], watch: SteadyBlocks | None = None) -> bool:
        """Play one step. `watch`: of operations of few blocks. Return False if they do not become steady."""
        self.at = 0
        self._batch()
        for operation in operations:
            if watch and not watch.at(operation):
                return False
            getattr(self, f"_{operation.kind}")(operation)
            self.at += 1
        for name, tensor in [key for key in self.tape.alive if key[0] == "batch"]:
            self._drop(name, tensor)
        return watch is None or watch.passed

    def _add(self, owner: str, tensor: str, nbytes: int, term: Term, stream: int = COMPUTE) -> None:
        self.tape.allocate(owner, tensor, nbytes, term, stream, self.at)

    def _drop(self, owner: str, tensor: str) -> None:
        self.tape.free(owner, tensor, self.at)

    # -- between steps -----------------------------------------------------------------------------------------

    def rest(self, description: Description) -> None:
        """Allocate what stays between steps: parameters, buffers, staging slots, residuals, and state apart from parameters."""
        for unit in self.plan.units:
            sizes = self.units[unit.name]
            if unit.home.params == "device":
                self.tape.allocate_row("rest", f"params:{unit.name}.", self.bytes.at_rest(sizes), "params", COMPUTE, self.at)
            if sizes.away and unit.home.optimizer == "device":  # master and moments, apart from the shard's memory
                self._add("rest", f"state:{unit.name}", self.away.state_of(sizes), "optimizer")
            if sizes.world > 1 and self.plan.wire.error_feedback:
                residual = sizes.world * self.plan.wire.message_bytes(*(sizes.shards[i] for i in sizes.trained))
                self._add("rest", f"residual:{unit.name}", residual, "residuals", REDUCE)
        self._add("rest", "scales", 4 * sum(len(sizes.float8) for sizes in self.units.values()), "params")
        for slot, nbytes in enumerate(self.away.staging()):
            self._add("rest", f"staging{slot}", nbytes, "staging")
        for b in [*description.buffers, *[b for u in description.units for b in u.buffers]]:
            self._add("rest", f"buffer:{b.name}", self._buffer_bytes(b), "buffers")

    def _buffer_bytes(self, buffer: Tensor) -> int:
        kind = self.plan.precision.buffers
        return buffer.nbytes if kind is None or buffer.dtype not in FLOATS else buffer.numel * item(kind)

    def states(self) -> None:
        """Allocate optimizer state, which the first update makes."""
        if self.has_states:
            return
        self.has_states = True
        for sizes in self.units.values():
            if not sizes.away:
                row = _state_row(sizes.trained_shards, self.plan.precision, self.slots)
                self.tape.allocate_row("rest", f"state:{sizes.name}.", row, "optimizer", COMPUTE, self.at)

    def left_over(self) -> None:
        """Allocate gradients of the previous step whose updates are still under way; the first units' came last."""
        for sizes in reversed(self.units.values()):
            if sizes.away and sizes.name in self.away.staying:
                self._add(sizes.name, "gradient", sizes.moving * self.away.gradient, "gradients", REDUCE)
                self._linger(sizes.name)

    def workspaces(self, *threads: str) -> None:
        """Allocate cuBLAS's workspaces: one for the thread that runs forward, one for autograd's."""
        for thread in (threads or ("forward", "backward")) if self.cublas else ():
            if ("workspace", thread) not in self.tape.alive:
                self._add("workspace", thread, CUBLAS_WORKSPACE, "workspace")

    def _batch(self) -> None:
        """The tensors of all micro-batches; by default token ids and labels, int64."""
        for micro in range(self.plan.batch.accumulate):
            for name, size in self.inputs.items():
                self._add(
                    "batch", f"{name}{micro}", evaluate(size, self.plan.batch.micro_batch, self.plan.batch.sequence), "batch"
                )

    # -- operations ------------------------------------------------------------------------------------------

    def _compute(self, op: Operation) -> None:
        section = op.section
        assert section is not None
        thread = "backward" if op.phase in BACKWARD else "forward"
        owners = {"": op.unit, "<": op.near[0], ">": op.near[1], "/": ""}
        term: Term = "loss" if op.phase in LOSS or not op.unit else "activations"
        allocate, free, at = self.tape.allocate, self.tape.free, self.at  # looked up once, for speed
        events = folded_events if self.tape.folds else sized_events
        by_rows = op.phase == "chunk" and self.plan.kernels.loss == "torch"
        if by_rows:
            self._add(op.unit, "rows", LOSS_ROWS, "loss")
        for action, tensor, unit, nbytes in events(section, *op.shape):
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
                self._drop(owner, tensor)  # it was added to the sum of earlier micro-batches
        if by_rows:
            self._drop(op.unit, "rows")

    def _gather(self, op: Operation) -> None:
        nbytes = op.nbytes
        if self.bytes.casts(self.units[op.unit]):
            self._add(op.unit, "flat", nbytes // op.ranks, "gathered", GATHER)
        self._add(op.unit, "buffer", nbytes, "gathered", GATHER)
        self._drop(op.unit, "flat")
        if self.bytes.gather_passes:
            elements = nbytes // self.compute
            self._quantized(self.bytes.gather_passes, op, elements // op.ranks, elements, "gathered", GATHER)
        self._drop(op.unit, "shard")

    def _unpack(self, op: Operation) -> None:
        row = self.bytes.unpacked(self.units[op.unit])
        self.tape.allocate_row(op.unit, "param", row, "gathered", COMPUTE, self.at)
        self.tape.free_row(op.unit, "part", row, self.at)
        self._drop(op.unit, "shard")

    def _release(self, op: Operation) -> None:
        self._drop(op.unit, "buffer")

    def _free(self, op: Operation) -> None:
        self.tape.free_row(op.unit, "param", self.units[op.unit].gathered, self.at)

    def _keep(self, op: Operation) -> None:
        sizes = self.units[op.unit]
        parts = tuple(n * self.compute // op.ranks for n in sizes.gathered)
        self.tape.replace_row(op.unit, "param", sizes.gathered_bytes(self.compute), "part", parts, "gathered", self.at)

    def _accumulate(self, op: Operation) -> None:
        """Unreduced gradients wait for the next micro-batch, in the reduce dtype."""
        sizes = self.units[op.unit]
        for tensor, elements in self._gradients(sizes):
            if (op.unit, tensor) not in self.tape.alive:
                continue
            if self.reduce == self.compute:
                self.tape.rename(op.unit, tensor, f"whole:{tensor}", "whole gradients", self.at)
                continue
            if op.first:
                self._add(op.unit, f"sum:{tensor}", elements * self.reduce, "whole gradients")
            self._drop(op.unit, tensor)

    def _gradients(self, sizes: UnitSizes) -> list[tuple[str, int]]:
        """Names and elements of a unit's gradients. Names are relative to the unit's first module."""
        if sizes.name not in self.named:
            prefix, trained = f"{self.modules[sizes.name]}.", (sizes.parameters[i] for i in sizes.trained)
            self.named[sizes.name] = [(f"grad:{p.name.removeprefix(prefix)}", p.numel) for p in trained]
        return self.named[sizes.name]

    def _reduce(self, op: Operation) -> None:
        sizes = self.units[op.unit]
        if sizes.takes_gradients:
            self._take(sizes, first=op.first)
            return
        in_place = op.ranks == 1 and not sizes.away  # then its output is its input
        output = self._reduced_name(sizes, first=op.first, in_place=in_place)
        term: Term = "gradients" if output == "gradient" else "reduce"
        if in_place:
            self._add(op.unit, output, op.nbytes, term)
        else:
            self._add(op.unit, "reduce input", op.nbytes, "reduce")
        if op.unit not in self.tables:
            (self.tables[op.unit],) = WORKSPACES["chunk_cat"](len(sizes.trained), *scaled(sizes.trained_shards, self.reduce))
        self._add(op.unit, "table", self.tables[op.unit], "reduce")
        self._drop(op.unit, "table")
        names = [tensor for tensor, _ in self._gradients(sizes)]
        last = names.pop() if op.ranks > 1 else ""  # a loop variable of FSDP2 holds it until the end
        self._drop_gradients(op.unit, names)
        if not in_place:
            self._add(op.unit, output, op.nbytes // op.ranks, term, REDUCE)
        self.last = last
        if self.bytes.reduce_passes and op.ranks > 1:
            elements = op.nbytes // self.reduce
            self._quantized(self.bytes.reduce_passes, op, elements, elements, "reduce", REDUCE)

    def _take(self, sizes: UnitSizes, *, first: bool) -> None:
        """Each gradient becomes that of the shard, through a cast if need be, or is added to it."""
        for tensor, elements in self._gradients(sizes):
            summed = (sizes.name, f"sum:{tensor}") in self.tape.alive or (sizes.name, f"whole:{tensor}") in self.tape.alive
            wide = self.reduce if summed else self.compute
            if first and (self.bytes.computed or wide == self.master):
                for name in (tensor, f"sum:{tensor}", f"whole:{tensor}"):
                    if (sizes.name, name) in self.tape.alive:
                        self.tape.rename(sizes.name, name, f"gradient:{tensor}", "gradients", self.at)
            elif first:
                self._add(sizes.name, f"gradient:{tensor}", elements * self.master, "gradients")
            self._drop_gradients(sizes.name, [tensor])

    def _reduced_name(self, sizes: UnitSizes, *, first: bool, in_place: bool) -> str:
        """What a reduction's output becomes: the gradient, or a temporary that is freed when its shard is settled, or, of one
        in place, when FSDP drops the input."""
        if self.reduce == self.bytes.kept_gradient(sizes) and first:
            return "gradient"
        held = sizes.copies > 1 and self.reduce != self.bytes.kept_gradient(sizes)
        return "reduce input" if in_place and not held else "reduced"

    def _quantized(self, passes: Quantization, op: Operation, packed: int, unpacked: int, term: Term, stream: int) -> None:
        """The messages of a quantised collective, and what packing and unpacking so many elements needs for a moment, one
        parameter after the other."""
        sizes = self.units[op.unit]
        largest = max(sizes.gathered[i] for i in (sizes.trained if op.kind == "reduce" else range(len(sizes.gathered))))
        self._add(op.unit, "message", op.sent * packed // unpacked, term, stream)
        self._add(op.unit, "packing", passes.passing(largest * packed // unpacked, packing=True), term, stream)
        self._drop(op.unit, "packing")
        self._add(op.unit, "messages", op.sent, term, stream)
        self._add(op.unit, "unpacking", passes.passing(largest, packing=False), term, stream)
        for name in ("unpacking", "messages", "message"):
            self._drop(op.unit, name)

    def _drop_gradients(self, unit: str, names: list[str]) -> None:
        summed = self.plan.batch.accumulate > 1
        for tensor in names[::-1]:  # the order in which a list frees its items
            for name in (tensor, f"sum:{tensor}", f"whole:{tensor}") if summed else (tensor,):
                self._drop(unit, name)

    def _all_reduce(self, op: Operation) -> None:
        """In place."""

    def _settle(self, op: Operation) -> None:
        """The reduced gradient becomes the gradient shard, cast if need be, or is added to it."""
        sizes = self.units[op.unit]
        if sizes.takes_gradients:
            return
        kept = self.bytes.kept_gradient(sizes)
        stream = ALL_REDUCE if sizes.copies > 1 else REDUCE
        if self.reduce != kept:
            self._add(op.unit, "gradient" if op.first else "cast", sizes.moving * kept, "gradients", stream)
        if self.reduce == kept or sizes.copies == 1:  # else the input of the all-reduce is held until the norm
            self._drop(op.unit, "reduced")
        self._drop(op.unit, "cast")
        self._drop_gradients(op.unit, [self.last])

    def _drain(self, op: Operation) -> None:
        self._drop(op.unit, "reduce input")

    def _norm(self, op: Operation) -> None:
        """The norm itself takes a few scalars for each parameter, which are not counted."""
        for name in self.units:
            self._drop(name, "reduced")

    def _update(self, op: Operation) -> None:
        """A fused update is in place; the first one makes the optimizer's state."""
        if not op.unit:
            self.states()
        elif not self.away.late:
            self._linger(op.unit)

    def _linger(self, unit: str) -> None:
        """A gradient waits for its update. Older ones beyond the backlog are freed before backward goes on."""
        for gone in self.waiting.add(unit):
            self._drop(gone, "gradient")

    def _zero(self, op: Operation) -> None:
        for name, sizes in self.units.items():
            if not sizes.away:
                self._drop(name, "gradient")
                for tensor, _ in self._gradients(sizes) if sizes.takes_gradients else ():
                    self._drop(name, f"gradient:{tensor}")

    # -- offload -------------------------------------------------------------------------------------

    def _await(self, op: Operation) -> None:
        if op.what == "update":
            self._drop(op.unit, "gradient")
            self.waiting.drop(op.unit)
        self._return(op, "disk")

    def _fetch(self, op: Operation) -> None:
        if op.what == "params":
            self._add(op.unit, "shard", op.nbytes, "fetched", TRANSFER)
        self._return(op, "host")

    def _return(self, op: Operation, place: HomeName) -> None:
        """Activations come back to the device: from the host ahead of use, from disk at their use."""
        for s in op.saved if self.units[op.unit].home.activations == place else ():
            if found := self.spilled.pop((s.owner, s.tensor)):
                self._add(s.owner, s.tensor, *found, TRANSFER)

    def _spill(self, op: Operation) -> None:
        """The copy goes into pinned memory that is counted elsewhere."""

    def _forget(self, op: Operation) -> None:
        if op.what == "gradients" and op.unit not in self.away.staying:
            self._drop(op.unit, "gradient")
        if op.saved:
            keys = [(s.owner, s.tensor) for s in op.saved]
            gone = {key: found[1:3] for key in keys if (found := self.tape.alive.get(key))}
            self.spilled.add(op.unit, self.units[op.unit].home.activations, gone)
            for key in gone:
                self._drop(*key)


@lru_cache(maxsize=4096)
def _state_row(shards: tuple[int, ...], precision: Precision, slots: int) -> tuple[int, ...]:
    """Bytes of each tensor of optimizer state: Adam has a step count on the device for each parameter."""
    return tuple(nbytes for n in shards for nbytes in [4] * (slots == 2) + [precision.moment_bytes(n)] * slots)
