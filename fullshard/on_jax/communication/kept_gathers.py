"""Parameters that a compiled program gathers and keeps from forward to backward, read from its HLO text.

Kept is what both phases read, whatever order XLA runs them in: schedules differ by platform, dependences do not.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from fullshard.on_jax.communication.hlo_collectives import (
    axes_of,
    called,
    computations_of,
    item_bytes,
    runs_of,
    shapes_in,
    unit_in,
)
from fullshard.plan.plan import Mesh

VIEWS = (
    "bitcast", "copy", "copy-start", "copy-done", "transpose", "convert", "reshape", "opt-barrier", "all-gather-done",
    "async-done",
)  # fmt: skip
LOOP = "loop"  # the phase of what the loop over micro-batches reads: it has both inside
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)")
_INDEX = re.compile(r"\bindex=(\d+)")
_PARAMS = re.compile(r'op_name="params\[')
Place = tuple[str, str]  # a computation, and a result in it


@dataclass(frozen=True)
class Instruction:
    """A line of a program. `shape`: of its result, as text."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    line: str

    @property
    def index(self) -> int:
        return int((_INDEX.search(self.line) or ["", "0"])[1])

    @property
    def phase(self) -> str:
        """Autodiff writes into the name of an operation whether it is of the backward pass."""
        return "backward" if "transpose(" in self.line else "forward" if "jvp(" in self.line else ""


@dataclass
class Program:
    """The instructions of each computation by their names, who reads each result, and what each loop begins with."""

    lines: dict[str, list[str]]
    parsed: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    readers: dict[Place, list[Instruction]] = field(default_factory=dict)
    begins: dict[str, list[Place]] = field(default_factory=dict)  # of a loop's body: what its values are at first

    @classmethod
    def of(cls, text: str) -> "Program":
        program = cls(computations_of(text))
        for computation in runs_of(program.lines):
            program._parse(computation)
        return program

    def _parse(self, computation: str) -> None:
        found = {i.name: i for line in self.lines[computation] if (i := _instruction(line))}
        self.parsed[computation] = found
        for instruction in found.values():
            for name in dict.fromkeys(instruction.operands):
                self.readers.setdefault((computation, name), []).append(instruction)
            if instruction.opcode == "while" and (given := found.get(instruction.operands[0])):
                self.begins[next(called(instruction.line), "")] = [(computation, name) for name in given.operands]

    # -- who reads a gathered parameter --------------------------------------------------------------------------

    def phases(self, place: Place, element: int | None) -> set[str]:
        """The phases that read a result in any view of it. `element`: the one to look at, if the result is a tuple."""
        return {phase for reader in self.readers.get(place, ()) for phase in self._read(place, reader, element)}

    def _read(self, place: Place, reader: Instruction, element: int | None) -> set[str]:
        computation, name = place
        view = computation, reader.name
        if reader.opcode == "get-tuple-element":
            return self.phases(view, None) if element in (None, reader.index) else set()
        if reader.opcode == "tuple":
            return {phase for i, o in enumerate(reader.operands) if o == name for phase in self.phases(view, i)}
        if reader.opcode in VIEWS or self._is_view(computation, reader):
            return self.phases(view, element)
        phase = self._phase(reader)
        if reader.opcode != "while" or phase:
            return {phase}
        body = next(called(reader.line), "")
        start = next((i.name for i in self.parsed.get(body, {}).values() if i.opcode == "parameter"), "")
        return {LOOP} if self.phases((body, start), element) else set()

    def _is_view(self, computation: str, reader: Instruction) -> bool:
        """A fusion of one tensor that has as many elements as its result."""
        if reader.opcode != "fusion" or len(reader.operands) != 1:
            return False
        source = self.parsed[computation].get(reader.operands[0])
        return source is not None and _numel(source) == _numel(reader)

    def _phase(self, reader: Instruction) -> str:
        inside = (i for name in called(reader.line) for i in self.parsed.get(name, {}).values() if reader.opcode == "fusion")
        return reader.phase or next((i.phase for i in inside if i.phase), "")

    # -- what is gathered ----------------------------------------------------------------------------------------

    def is_weight(self, place: Place) -> bool:
        """Whether a value is parameters in another form, and nothing else."""
        found, seen, wanted = False, set(), [place]
        while wanted:
            if (at := wanted.pop()) in seen:
                continue
            seen.add(at)
            instruction = self.parsed[at[0]].get(at[1])
            if instruction is None or (sources := self._sources(at[0], instruction)) is None:
                return False
            found, wanted = found or instruction.opcode == "parameter", wanted + sources
        return found

    def _sources(self, computation: str, instruction: Instruction) -> list[Place] | None:
        """What a value is made from; None if that is no parameter of the model."""
        if instruction.opcode == "parameter":
            return [] if _PARAMS.search(instruction.line) else None
        sources = [(computation, operand) for operand in instruction.operands]
        if instruction.opcode != "get-tuple-element":
            return sources
        made = self.parsed[computation].get(instruction.operands[0])
        begins = self.begins.get(computation, []) if made and made.opcode == "parameter" else []
        return begins[instruction.index : instruction.index + 1] or sources


def kept_gathers(text: str, mesh: Mesh) -> Iterator[tuple[str, int]]:
    """(unit, bytes) of each gathered parameter that the program with this HLO text keeps. The unit is empty for parameters that
    are read outside the calls of their unit."""
    program = Program.of(text)
    for computation, instructions in program.parsed.items():
        for gather in instructions.values():
            if gather.opcode in ("all-gather", "all-gather-start") and "shard" in axes_of(gather.line, mesh):
                yield from _kept(program, computation, gather)


def _kept(program: Program, computation: str, gather: Instruction) -> Iterator[tuple[str, int]]:
    shapes = shapes_in(gather.shape)
    if gather.opcode == "all-gather-start":  # returns (operands, results)
        shapes = shapes[len(gather.operands) :]
    for i, (operand, (dtype, dims)) in enumerate(zip(gather.operands, shapes, strict=True)):
        source = program.parsed[computation].get(operand)
        unit = unit_in(source.line if source else "") or unit_in(gather.line)
        phases = program.phases((computation, gather.name), i if len(gather.operands) > 1 else None)
        if (LOOP in phases or {"forward", "backward"} <= phases) and program.is_weight((computation, operand)):
            yield unit, item_bytes(dtype) * math.prod(dims)


def _instruction(line: str) -> Instruction | None:
    if (match := _INSTRUCTION.match(line)) is None:
        return None
    name, shape, opcode, operands = match.groups()
    return Instruction(name, opcode, shape, tuple(re.findall(r"%([\w.\-]+)", operands)), line)


def _numel(instruction: Instruction) -> list[int]:
    return [math.prod(dims) for _, dims in shapes_in(instruction.shape)]
