"""What computing a model costs, without the model: allocations, flops and bytes of its parts, in order.

An engine writes it by tracing the model once; the planner reads it. Sizes are polynomials in the batch
shape, so that one trace serves every shape. Standard library only.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from fullshard.errors import FullshardError
from fullshard.model.kernel_workspace import HIDDEN

# Coefficients of 1, T, T², B, B·T, B·T²: B rows of T tokens.
Polynomial = tuple[int, int, int, int, int, int]
POWERS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))  # of B and T

ALLOCATE, FREE, READY = "allocate", "free", "ready"
Action = Literal["allocate", "free", "ready", "multiply"]
OpKind = Literal["gemm", "attention", "pointwise", "all_reduce", "all_gather", "reduce_scatter"]
TENSOR_AXIS: tuple[OpKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")  # collectives within a section


def evaluate(p: Polynomial, rows: int, tokens: int) -> int:
    """The polynomial at B = `rows`, T = `tokens`."""
    return p[0] + tokens * (p[1] + tokens * p[2]) + rows * (p[3] + tokens * (p[4] + tokens * p[5]))


def constant(value: int) -> Polynomial:
    return (value, 0, 0, 0, 0, 0)


def fit(values: dict[tuple[int, int], int]) -> Polynomial | None:
    """The polynomial through values at (B, T) points: two B's × three T's; None if it has no whole coefficients."""
    rows, lengths = sorted({b for b, _ in values}), sorted({t for _, t in values})
    lines = [_through([(t, Fraction(values[b, t])) for t in lengths]) for b in rows]
    slopes = [(high - low) / (rows[1] - rows[0]) for low, high in zip(*lines, strict=True)]
    bases = [low - rows[0] * slope for low, slope in zip(lines[0], slopes, strict=True)]
    found = [*bases, *slopes]
    if any(c.denominator != 1 for c in found):
        return None
    return (int(found[0]), int(found[1]), int(found[2]), int(found[3]), int(found[4]), int(found[5]))


def _through(points: list[tuple[int, Fraction]]) -> list[Fraction]:
    """c0, c1, c2 of the parabola through three points."""
    (x0, y0), (x1, y1), (x2, y2) = points
    d01, d12 = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    c2 = (d12 - d01) / (x2 - x0)
    c1 = d01 - c2 * (x0 + x1)
    return [y0 - c1 * x0 - c2 * x0 * x0, c1, c2]


@dataclass(frozen=True)
class Event:
    """One thing that happens to a tensor. `ready`: a parameter's gradient is complete. `multiply`, of no tensor: the
    section's first matrix product starts, its result allocated.

    `unit` says whose tensor it is: "" for the unit whose section this is, else the name of another.
    `tensor` is a number, or a role: `out0` a unit's output, `in0` the gradient of its input, `grad:NAME`
    the gradient of its parameter. A `size` of several polynomials is what the kernel `rule` allocates for
    itself, given them.
    """

    action: Action
    tensor: str
    unit: str = ""
    size: tuple[Polynomial, ...] = ()
    rule: str = ""

    def sizes(self, rows: int, tokens: int) -> tuple[int, ...]:
        """Bytes of each allocation that this event stands for."""
        values = tuple(evaluate(p, rows, tokens) for p in self.size)
        return HIDDEN[self.rule](*values) if self.rule else values


@dataclass(frozen=True)
class Op:
    """Work: one matrix product or attention, all the pointwise kernels of a section together, or a collective of the
    tensor axis.

    `moved`: bytes read and written, of a collective those of the whole tensor. `shape`: m, n, k of a
    matrix product. `count`: kernels.
    """

    kind: OpKind
    flops: Polynomial
    moved: Polynomial
    shape: tuple[Polynomial, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Calls:
    """What remat makes the host do in Python, beside launching kernels. A block that is computed again counts twice.

    `regions`: that were entered; `saved`: tensors that autograd saved inside; `dispatched`: operations, views among
    them, that went through the contexts of selective remat.
    """

    regions: int = 0
    saved: int = 0
    dispatched: int = 0


# The phases of a step at which sharding acts, in the order in which a unit meets them; a section is what
# happens from one to the next.
Phase = Literal["start", "enter", "forward", "leave", "chunk", "chunked", "loss", "backward", "done", "end"]


@dataclass(frozen=True)
class Section:
    """What happens after a phase of a unit, until the next phase of any unit."""

    events: tuple[Event, ...] = ()
    ops: tuple[Op, ...] = ()
    calls: Calls = Calls()

    __hash__ = object.__hash__  # by identity: caches look sections up by the thousand


@dataclass(frozen=True)
class Trace:
    """A micro-batch under one remat choice: the phases in order, and what happens after each.

    `phases`: (phase, unit) pairs; `sections`: the template of each, shared by units that are alike.
    """

    phases: tuple[tuple[Phase, str], ...]
    sections: tuple[Section, ...]
    template: tuple[int, ...]  # which section follows phase i

    def __iter__(self) -> Iterator[tuple[Phase, str, Section]]:
        for (phase, unit), index in zip(self.phases, self.template, strict=True):
            yield phase, unit, self.sections[index]

    @cached_property
    def by_phase(self) -> dict[tuple[Phase, str], Section]:
        return {(phase, unit): section for phase, unit, section in self}


@dataclass(frozen=True)
class Costs:
    """Traces of a model by (compute dtype, loss, remat). `shape`: the only (B, T) they hold for, if one.

    `split`: the same for a rank of a tensor axis of so many ranks; those have `shapes`, of the parameters there.
    """

    traces: dict[tuple[str, str, str], Trace] = field(default_factory=dict)
    shape: tuple[int, int] | None = None
    vocabulary: int = 0  # rows of the head: the chunked loss cuts tokens by it; 0 where it cannot
    split: "dict[int, Costs]" = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def on(self, tensor: int) -> "Costs":
        """What a rank of a tensor axis of `tensor` ranks computes."""
        if tensor == 1:
            return self
        if tensor not in self.split:
            known = f" (traced: {', '.join(map(str, self.split))})" if self.split else ""
            raise FullshardError(
                f"this model was not traced for mesh.tensor = {tensor}{known}; describe it with tensor=({tensor},)"
            )
        return self.split[tensor]

    def trace(self, compute: str, loss: str, remat: str) -> Trace:
        key = ("bf16" if compute == "fp16" else compute, loss, remat)  # traced as one
        if key not in self.traces:
            known = ", ".join("/".join(k) for k in self.traces)
            raise FullshardError(f"this model was not traced for {'/'.join(key)} (traced: {known}); describe it for that")
        return self.traces[key]

    def check(self, rows: int, tokens: int) -> None:
        if self.shape is not None and (rows, tokens) != self.shape:
            raise FullshardError(
                f"this model's costs were traced for {self.shape[0]} × {self.shape[1]} only; "
                f"describe it with micro_batch={rows}, sequence={tokens}"
            )


# -- JSON --------------------------------------------------------------------------------------------------


def to_json(traces: dict[tuple[str, str, str], Trace]) -> dict[str, Any]:
    """Compact: every polynomial and every section once."""
    sizes = _Table()
    sections = _Table()
    out: dict[str, Any] = {}
    for key, trace in traces.items():
        indices = [sections.index(_section_json(s, sizes)) for s in trace.sections]
        out["/".join(key)] = {"moments": [list(m) for m in trace.phases], "template": [indices[t] for t in trace.template]}
    return {"sizes": sizes.rows, "sections": sections.rows, "traces": out}


def from_json(data: dict[str, Any]) -> dict[tuple[str, str, str], Trace]:
    sizes = [tuple(row) for row in data["sizes"]]
    sections = tuple(_section(row, sizes) for row in data["sections"])
    traces = {}
    for name, row in data["traces"].items():
        compute, loss, remat = name.split("/")
        phases = tuple((m, u) for m, u in row["moments"])
        traces[compute, loss, remat] = Trace(phases, sections, tuple(row["template"]))
    return traces


class _Table:
    """Rows that are written once and named by their number."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.known: dict[str, int] = {}

    def index(self, row: Any) -> int:
        key = repr(row)
        if key not in self.known:
            self.known[key] = len(self.rows)
            self.rows.append(row)
        return self.known[key]


LETTERS = {"allocate": "a", "free": "f", "ready": "r", "multiply": "m"}
ACTIONS: dict[str, Action] = {"a": "allocate", "f": "free", "r": "ready", "m": "multiply"}
KINDS: dict[str, OpKind] = {"g": "gemm", "t": "attention", "p": "pointwise"}
KINDS |= {"A": "all_reduce", "G": "all_gather", "R": "reduce_scatter"}


def _section_json(section: Section, sizes: _Table) -> list[Any]:
    events = []
    for e in section.events:
        row: list[Any] = [LETTERS[e.action], e.tensor]
        if e.unit or e.action == "allocate":
            row.append(e.unit)
        if e.action == "allocate":
            row += [e.rule, *[sizes.index(list(s)) for s in e.size]] if e.rule else [sizes.index(list(e.size[0]))]
        events.append(row)
    letter = {kind: letter for letter, kind in KINDS.items()}
    ops = [
        [
            letter[o.kind],
            o.count,
            sizes.index(list(o.flops)),
            sizes.index(list(o.moved)),
            *[sizes.index(list(s)) for s in o.shape],
        ]
        for o in section.ops
    ]
    calls = [section.calls.regions, section.calls.saved, section.calls.dispatched]
    return [events, ops, calls] if any(calls) else [events, ops]


def _section(row: list[Any], sizes: list[Any]) -> Section:
    events = tuple(_event(e, sizes) for e in row[0])
    ops = tuple(Op(KINDS[o[0]], sizes[o[2]], sizes[o[3]], tuple(sizes[s] for s in o[4:]), o[1]) for o in row[1])
    return Section(events, ops, Calls(*row[2]) if len(row) > 2 else Calls())


def _event(row: list[Any], sizes: list[Any]) -> Event:
    action, tensor, unit, *rest = [*row, ""] if len(row) == 2 else row
    rule = rest.pop(0) if rest and isinstance(rest[0], str) else ""
    return Event(ACTIONS[action], tensor, unit, tuple(sizes[i] for i in rest), rule)


def totals(sections: Iterable[Section]) -> dict[OpKind, tuple[int, ...]]:
    """Flops by kind, as polynomials."""
    found: dict[OpKind, tuple[int, ...]] = {}
    for section in sections:
        for op in section.ops:
            so_far = found.get(op.kind, constant(0))
            found[op.kind] = tuple(a + b for a, b in zip(so_far, op.flops, strict=True))
    return found
