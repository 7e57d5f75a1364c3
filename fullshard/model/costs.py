"""What a step of a model computes, without the model: allocations, flops and bytes moved, in order.

An engine makes it by tracing the model once, and the planner reads it. Sizes are polynomials in the batch shape, so one
trace serves every shape. Standard library only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from fullshard.base.errors import FullshardError
from fullshard.model.kernel_workspaces import WORKSPACES
from fullshard.plan.choices import Mesh

# Coefficients of 1, T, T², B, B·T, B·T²: B rows of T tokens.
Polynomial = tuple[int, int, int, int, int, int]

TOKENS: dict[str, Polynomial] = dict.fromkeys(("input_ids", "labels"), (0, 0, 0, 0, 8, 0))  # bytes of a batch, int64

ANY_ROWS = 0  # in the shape of costs that hold for one number of tokens

Action = Literal["allocate", "free", "ready", "multiply"]
OpKind = Literal[
    "gemm", "conv", "depthwise", "attention", "pointwise", "reduction", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
]
# Collectives inside a section: of the tensor axis, and the all-to-all of the expert axis.
AXIS_COLLECTIVES: tuple[OpKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def evaluate(p: Polynomial, rows: int, tokens: int) -> int:
    """The polynomial at B = `rows`, T = `tokens`."""
    return p[0] + tokens * (p[1] + tokens * p[2]) + rows * (p[3] + tokens * (p[4] + tokens * p[5]))


def constant(value: int) -> Polynomial:
    return (value, 0, 0, 0, 0, 0)


def fit(values: dict[tuple[int, int], int]) -> Polynomial | None:
    """The polynomial through values at (B, T), two Bs × three Ts; None if a coefficient is no integer. With one T, it is one
    in B alone."""
    rows, lengths = sorted({b for b, _ in values}), sorted({t for _, t in values})
    if len(lengths) == 1:
        low, high = (values[b, lengths[0]] for b in rows)
        slope, rest = divmod(high - low, rows[1] - rows[0])
        return None if rest else (low - slope * rows[0], 0, 0, slope, 0, 0)
    lines = [_through([(t, Fraction(values[b, t])) for t in lengths]) for b in rows]
    slopes = [(high - low) / (rows[1] - rows[0]) for low, high in zip(*lines, strict=True)]
    bases = [low - rows[0] * slope for low, slope in zip(lines[0], slopes, strict=True)]
    terms = [*bases, *slopes]
    if any(c.denominator != 1 for c in terms):
        return None
    return (int(terms[0]), int(terms[1]), int(terms[2]), int(terms[3]), int(terms[4]), int(terms[5]))


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
    `rule`: for a kernel's own workspace, the name of its function in `kernel_workspaces`; `size` then has its arguments.
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
    """One matrix product, convolution, attention or reduction, all pointwise kernels of a section, or a collective of an axis.

    `moved`: bytes read and written; of a collective, those of the whole tensor. `shape`: m, n, k of a matrix product or
    convolution; of attention the width of a head and, in the trace of an example, the number of keys and 1 if it is causal,
    else 2; of a depthwise convolution how many times as long as cuDNN's kernel it takes; of a reduction by few blocks of threads
    the elements of a block, and the blocks.
    `count`: number of kernels. `float8`: a product that a plan computes in float8; traces have none.
    """

    kind: OpKind
    flops: Polynomial
    moved: Polynomial
    shape: tuple[Polynomial, ...] = ()
    count: int = 1
    float8: bool = False


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
class Example:
    """The batch that a model was traced with, if it is no batch of tokens. Polynomials are then in B alone, at T = 1.

    `dims`: of a row, as text. `rows`: of the example. `inputs`: bytes of each tensor of a batch by name. `notes`: sentences
    about what the traces do not show.
    """

    dims: str
    rows: int
    inputs: dict[str, Polynomial]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Costs:
    """Traces of a model by (compute dtype, loss, remat). `shape`: the only (B, T) that they hold for, with ANY_ROWS for B if
    only T is bound; None if they hold for all. `example`: the batch of a model that does not take rows of tokens; its own
    loss is called `plain`.

    `split`: by ranks of the tensor axis, the costs of one of these ranks. `shapes`: in those, the parameters' local shapes.
    `spread`: by ranks of the expert axis, the costs of one of these ranks.
    """

    traces: dict[tuple[str, str, str], Trace] = field(default_factory=dict)
    shape: tuple[int, int] | None = None
    vocabulary: int = 0  # rows of the head, which set the size of the loss's chunks; 0 if the loss cannot be chunked
    split: "dict[int, Costs]" = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    spread: "dict[int, Costs]" = field(default_factory=dict)
    example: Example | None = None

    @property
    def inputs(self) -> dict[str, Polynomial]:
        """Bytes of each tensor of a batch."""
        return self.example.inputs if self.example else TOKENS

    @property
    def dims(self) -> str:
        """The dims of a row; empty for tokens."""
        return self.example.dims if self.example else ""

    def on(self, mesh: Mesh) -> "Costs":
        """The costs of one rank of a mesh with a tensor or an expert axis."""
        axis, ranks, costs = ("expert", mesh.expert, self.spread) if mesh.expert > 1 else ("tensor", mesh.tensor, self.split)
        if ranks == 1:
            return self
        if ranks not in costs:
            known = f" (traced: {', '.join(map(str, costs))})" if costs else ""
            raise FullshardError(
                f"this model was not traced for mesh.{axis} = {ranks}{known}; describe it with {axis}=({ranks},)"
            )
        return costs[ranks]

    def trace(self, compute: str, loss: str, remat: str) -> Trace:
        key = ("bf16" if compute == "fp16" else compute, "plain" if self.example else loss, remat)  # traced as one
        if key not in self.traces:
            known = ", ".join("/".join(k) for k in self.traces)
            raise FullshardError(f"this model was not traced for {'/'.join(key)} (traced: {known}); describe it for that")
        return self.traces[key]

    def check(self, rows: int, tokens: int, dims: str = "") -> None:
        """Raise unless the traces hold for this batch."""
        if dims != self.dims:
            known = f"rows of {self.dims}" if self.dims else "rows of tokens"
            wanted = f"rows of {dims}" if dims else f"rows of {tokens} tokens"
            raise FullshardError(
                f"this model was described for {known}, the plan is for {wanted}; write batch=description.batch({rows}), or "
                "describe the model with such an example"
            )
        if self.example and self.shape is not None and rows != self.shape[0]:
            raise FullshardError(
                f"this model's costs were traced for {self.shape[0]} rows only; describe it with an example of {rows} rows"
            )
        if self.shape is not None and (self.shape[0] not in (ANY_ROWS, rows) or self.shape[1] != tokens):
            known = f"sequences of {self.shape[1]}" if self.shape[0] == ANY_ROWS else f"{self.shape[0]} × {self.shape[1]}"
            raise FullshardError(
                f"this model's costs were traced for {known} only; describe it with micro_batch={rows}, sequence={tokens}"
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
KINDS: dict[str, OpKind] = {"g": "gemm", "c": "conv", "t": "attention", "p": "pointwise"}
KINDS |= {"d": "depthwise", "r": "reduction"}
KINDS |= {"A": "all_reduce", "G": "all_gather", "R": "reduce_scatter", "X": "all_to_all"}


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
