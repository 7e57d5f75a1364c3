"""What a step of a model computes, without the model: allocations, flops and bytes moved, in order.

An engine makes it by tracing the model once, and the planner reads it. Sizes are polynomials in the batch shape, so one
trace serves every shape. Standard library only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from fullshard.errors import FullshardError
from fullshard.model.kernel_workspace import WORKSPACES

# Coefficients of 1, T, T², B, B·T, B·T²: B rows of T tokens.
Polynomial = tuple[int, int, int, int, int, int]

Action = Literal["allocate", "free", "ready", "multiply"]
OpKind = Literal["gemm", "attention", "pointwise", "all_reduce", "all_gather", "reduce_scatter"]
TENSOR_AXIS: tuple[OpKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")  # collectives of tensor parallelism


def evaluate(p: Polynomial, rows: int, tokens: int) -> int:
    """The polynomial at B = `rows`, T = `tokens`."""
    return p[0] + tokens * (p[1] + tokens * p[2]) + rows * (p[3] + tokens * (p[4] + tokens * p[5]))


def constant(value: int) -> Polynomial:
    return (value, 0, 0, 0, 0, 0)


def fit(values: dict[tuple[int, int], int]) -> Polynomial | None:
    """The polynomial through values at (B, T), two Bs × three Ts; None if a coefficient is no integer."""
    rows, lengths = sorted({b for b, _ in values}), sorted({t for _, t in values})
    lines = [_through([(t, Fraction(values[b, t])) for t in lengths]) for b in rows]
    slopes = [(high - low) / (rows[1] - rows[0]) for low, high in zip(*lines, strict=True)]
    bases = [low - rows[0] * slope for low, slope in zip(lines[0], slopes, strict=True)]
    found = [*bases, *slopes]
    if any(c.denominator != 1 for c in found):
        return None
    return (int(found[0]), int(found[1]), int(found[2]), int(found[3]), int(found[4]), int(found[5]))


def _through(points: list[tuple[int, Fraction]]) -> list[Fraction]:
    """Coefficients c0, c1, c2 of the parabola through three points."""
    (x0, y0), (x1, y1), (x2, y2) = points
    d01, d12 = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    c2 = (d12 - d01) / (x2 - x0)
    c1 = d01 - c2 * (x0 + x1)
    return [y0 - c1 * x0 - c2 * x0 * x0, c1, c2]


@dataclass(frozen=True)
class Event:
    """One thing that happens to a tensor.

    `action`: `ready` means that a parameter's gradient is complete. `multiply` has no tensor: the section's first matrix
    product starts, after its result was allocated. `unit`: whose tensor it is; "" for the unit of this section. `tensor`: a
    number, or a role: `out0` a unit's output, `in0` the gradient of its input, `grad:NAME` the gradient of a parameter.
    `rule`: for a kernel's own workspace, the name of its function in `kernel_workspace`; `size` then has its arguments.
    """

    action: Action
    tensor: str
    unit: str = ""
    size: tuple[Polynomial, ...] = ()
    rule: str = ""

    def sizes(self, rows: int, tokens: int) -> tuple[int, ...]:
        """Bytes of each allocation of this event."""
        values = tuple(evaluate(p, rows, tokens) for p in self.size)
        return WORKSPACES[self.rule](*values) if self.rule else values


@dataclass(frozen=True)
class Op:
    """One matrix product or attention, all pointwise kernels of a section together, or a collective of the tensor axis.

    `moved`: bytes read and written; of a collective, those of the whole tensor. `shape`: m, n, k of a matrix product.
    `count`: number of kernels.
    """

    kind: OpKind
    flops: Polynomial
    moved: Polynomial
    shape: tuple[Polynomial, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Calls:
    """What remat makes the host do in Python, beside launching kernels. A block that is recomputed counts twice.

    `regions`: remat regions entered. `saved`: tensors that autograd saves inside. `dispatched`: operations, views included,
    that pass the contexts of selective remat.
    """

    regions: int = 0
    saved: int = 0
    dispatched: int = 0


# The phases of a micro-batch at which sharding acts, in the order in which a unit meets them.
Phase = Literal["start", "enter", "forward", "leave", "chunk", "chunked", "loss", "backward", "done", "end"]


@dataclass(frozen=True)
class Section:
    """What is computed from the start of a phase of a unit until the next phase of any unit."""

    events: tuple[Event, ...] = ()
    ops: tuple[Op, ...] = ()
    calls: Calls = Calls()

    __hash__ = object.__hash__  # by identity, which is faster: caches look up thousands of sections


@dataclass(frozen=True)
class Trace:
    """A micro-batch under one remat choice.

    `phases`: (phase, unit) in order. `sections`: the different sections; units that are alike share theirs. `template`: the
    index of the section of each phase.
    """

    phases: tuple[tuple[Phase, str], ...]
    sections: tuple[Section, ...]
    template: tuple[int, ...]

    def __iter__(self) -> Iterator[tuple[Phase, str, Section]]:
        for (phase, unit), index in zip(self.phases, self.template, strict=True):
            yield phase, unit, self.sections[index]

    @cached_property
    def by_phase(self) -> dict[tuple[Phase, str], Section]:
        return {(phase, unit): section for phase, unit, section in self}


@dataclass(frozen=True)
class Costs:
    """Traces of a model by (compute dtype, loss, remat). `shape`: the only (B, T) that they hold for; None if for all.

    `split`: by ranks of the tensor axis, the costs of one of these ranks. `shapes`: in those, the parameters' local shapes.
    """

    traces: dict[tuple[str, str, str], Trace] = field(default_factory=dict)
    shape: tuple[int, int] | None = None
    vocabulary: int = 0  # rows of the head, which set the size of the loss's chunks; 0 if the loss cannot be chunked
    split: "dict[int, Costs]" = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def on(self, tensor: int) -> "Costs":
        """The costs of one rank of a tensor axis of `tensor` ranks."""
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
    """Traces as JSON. Every polynomial and every section is written once and then named by its number."""
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
    """Rows without repetition, named by their number."""

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
