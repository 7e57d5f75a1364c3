"""Fit the sizes in traces of one model at several batch shapes by polynomials in the batch shape."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fullshard.model.costs import Action, OpKind, Phase, Polynomial, constant, evaluate, fit
from fullshard.on_torch.tracing.recorder import KernelUse, RawSection, Recorder

Shape = tuple[int, int]  # rows, tokens
PAIR = (0, 6)  # of seven shapes, 2 × 1 and 4 × 3 of the smallest: each term of a polynomial grows by another factor
ZERO = constant(0)
Solve = Callable[[tuple[int, ...]], Polynomial]  # a size at each shape to its polynomial
FittedEvent = tuple[Action, int, str, tuple[Polynomial, ...]]  # as `recorder.RawEvent`
FittedWork = tuple[OpKind, Polynomial, Polynomial, tuple[Polynomial, ...]]  # as `cuda_kernels.KernelWork`


@dataclass(frozen=True)
class FittedSection:
    """As `recorder.RawSection`, with polynomials for sizes."""

    phase: Phase
    unit: str
    events: list[FittedEvent] = field(default_factory=list)
    ops: list[FittedWork] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class FittedTrace:
    """What a recorder has recorded, with polynomials for sizes."""

    sections: list[FittedSection]
    roles: dict[int, tuple[str, str]]
    uses: list[KernelUse]


class Fits:
    """The polynomials of the sizes of one model. The last of `shapes` only checks those that the others determine.

    A model has the same sizes under every remat choice. So once a trace was fitted at all shapes, sizes at a `pair` of them tell
    most polynomials, where only one of those known has these sizes there. `lengths`: whether attention has its own length,
    rather than that of the batch.
    """

    def __init__(self, shapes: list[Shape], lengths: bool = False):
        self.shapes, self.lengths = shapes, lengths
        self.pair = [shapes[i] for i in PAIR] if len(shapes) > max(PAIR) else shapes
        self.known: dict[tuple[int, ...], Polynomial] = {}
        self.by_pair: dict[tuple[int, ...], Polynomial | None] = {}  # None: several have these sizes

    def fitted(self, recorders: dict[Shape, Recorder]) -> FittedTrace | None:
        """The trace for all shapes, from those at all or at a pair. None if the shapes differ in more than sizes, a size is not
        a polynomial, or the pair does not tell it. From one shape, all sizes are constant."""
        first, *others = recorders.values()
        if any(not _alike(first, other) for other in others):
            return None
        solve = _constant if not others else self._solve if list(recorders) == self.shapes else self._recall
        try:
            same = zip(*[r.sections for r in recorders.values()], strict=True)
            return FittedTrace([self._section(solve, sections) for sections in same], first.roles, first.uses)
        except ValueError:
            return None

    def _section(self, solve: Solve, same: tuple[RawSection, ...]) -> FittedSection:
        """One section from that of each shape."""
        first = same[0]
        events: list[FittedEvent] = [
            (action, tensor, rule, _solve_each(solve, [s.events[i][3] for s in same]) if sizes else ())
            for i, (action, tensor, rule, sizes) in enumerate(first.events)
        ]
        ops = [self._work(solve, [s.ops[i] for s in same]) for i in range(len(first.ops))]
        return FittedSection(first.phase, first.unit, events, ops, first.calls)

    def _work(self, solve: Solve, same: list[Any]) -> FittedWork:
        """One kernel from its work at every shape."""
        flops, moved = (solve(tuple(work[part] for work in same)) for part in (1, 2))
        shapes = [work[3] for work in same]
        if same[0][0] == "attention" and not self.lengths:
            shapes = [(shape[0], 1, 1) for shape in shapes]
        return same[0][0], flops, moved, _solve_each(solve, shapes)

    def _solve(self, values: tuple[int, ...]) -> Polynomial:
        if values not in self.known:
            by_shape = dict(zip(self.shapes, values, strict=True))
            self.known[values] = found = _polynomial(by_shape)
            key = tuple(by_shape[s] for s in self.pair)
            self.by_pair[key] = found if self.by_pair.get(key, found) == found else None
        return self.known[values]

    def _recall(self, values: tuple[int, ...]) -> Polynomial:
        found = self.by_pair.get(values)
        if found is None:
            raise ValueError(f"unknown: {values}")
        return found


def total(parts: Iterable[Polynomial]) -> Polynomial:
    """The sum of polynomials."""
    columns = [sum(column) for column in zip(ZERO, *parts, strict=True)]
    return columns[0], columns[1], columns[2], columns[3], columns[4], columns[5]


def _constant(values: tuple[int, ...]) -> Polynomial:
    return constant(values[0])


def _alike(one: Recorder, other: Recorder) -> bool:
    """True if two traces differ in sizes alone."""
    if one.roles != other.roles or len(one.sections) != len(other.sections) or one.uses != other.uses:
        return False
    return all(_shape_free(a) == _shape_free(b) for a, b in zip(one.sections, other.sections, strict=True))


def _shape_free(section: RawSection) -> tuple[Any, ...]:
    """All of a section that must not depend on the batch shape."""
    return section.phase, section.unit, [e[:3] for e in section.events], [o[0] for o in section.ops]


def _polynomial(values: dict[Shape, int]) -> Polynomial:
    """The polynomial through all values but the last. Raises ValueError if it misses the last."""
    *grid, last = values
    found = fit({shape: values[shape] for shape in grid})
    if found is None or evaluate(found, *last) != values[last]:
        raise ValueError(f"no polynomial: {values}")
    return found


def _solve_each(solve: Solve, sizes: list[tuple[int, ...]]) -> tuple[Polynomial, ...]:
    return tuple(solve(values) for values in zip(*sizes, strict=True))
