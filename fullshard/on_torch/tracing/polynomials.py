"""Fit the sizes in traces of one model at several batch shapes by polynomials in the batch shape."""

from collections.abc import Callable
from typing import Any

from fullshard.model.costs import Calls, Op, Polynomial, Section, Trace, constant, evaluate, fit
from fullshard.on_torch.tracing.tensor_names import NamedSections

Shape = tuple[int, int]  # rows, tokens
FEW = (0, 2, 4, 6)  # of seven shapes, four that lie on no line: 2 × 1, 2 × 4, 3 × 2 and 4 × 3 of the smallest
Solve = Callable[[tuple[int, ...]], Polynomial]  # a size at each shape to its polynomial


def fixed_trace(named: NamedSections, lengths: bool = False) -> Trace:
    """The trace for one shape, with constant sizes."""
    return _assemble([named], lambda values: constant(values[0]), lengths)


class Fits:
    """The polynomials of the sizes of one model. The last of `shapes` only checks those that the others determine.

    A model has the same sizes under every remat choice. So once a trace was fitted at all shapes, sizes at a `few` of them tell
    most polynomials, where only one of those known has these sizes there.
    """

    def __init__(self, shapes: list[Shape]):
        self.shapes = shapes
        places = FEW if len(shapes) > max(FEW) else range(len(shapes))
        self.few = [shapes[i] for i in places]
        self.known: dict[tuple[int, ...], Polynomial] = {}
        self.by_few: dict[tuple[int, ...], Polynomial | None] = {}  # None: several have these sizes

    def trace(self, named: dict[Shape, NamedSections], lengths: bool = False) -> Trace | None:
        """The trace for all shapes, from those at all or at a few. None if the shapes differ in more than sizes, a size is not a
        polynomial, or a few shapes do not tell it.

        `lengths`: whether attention has its own length, rather than that of the batch.
        """
        first, *others = named.values()
        if any(_skeleton(other) != _skeleton(first) for other in others):
            return None
        try:
            return _assemble([first, *others], self._solve if list(named) == self.shapes else self._recall, lengths)
        except ValueError:
            return None

    def _solve(self, values: tuple[int, ...]) -> Polynomial:
        if values not in self.known:
            by_shape = dict(zip(self.shapes, values, strict=True))
            self.known[values] = found = _polynomial(by_shape)
            key = tuple(by_shape[s] for s in self.few)
            self.by_few[key] = found if self.by_few.get(key, found) == found else None
        return self.known[values]

    def _recall(self, values: tuple[int, ...]) -> Polynomial:
        found = self.by_few.get(values)
        if found is None:
            raise ValueError(f"unknown: {values}")
        return found


def _skeleton(named: NamedSections) -> list[Any]:
    """All that must not depend on the batch shape."""
    known: dict[int, list[Any]] = {}  # by the list of events, which skipped blocks share
    found = []
    for section, events in named:
        if id(events) not in known:
            known[id(events)] = [e.shape_free for e in events]
        found.append((section.phase, section.unit, known[id(events)], [o[0] for o in section.ops]))
    return found


def _polynomial(values: dict[Shape, int]) -> Polynomial:
    """The polynomial through all values but the last. Raises ValueError if it misses the last."""
    *grid, last = values
    found = fit({shape: values[shape] for shape in grid})
    if found is None or evaluate(found, *last) != values[last]:
        raise ValueError(f"no polynomial: {values}")
    return found


def _assemble(shapes: list[NamedSections], solve: Solve, lengths: bool) -> Trace:
    """One trace from those of all shapes."""
    sections: list[Section] = []
    known: dict[tuple[int, ...], int] = {}  # blocks that were skipped share events and kernels with the one that stands for them
    template = []
    for same in zip(*shapes, strict=True):  # one section at every shape
        raw, events = same[0]
        key = tuple(id(part) for raw_section, named in same for part in (named, raw_section.ops))
        if key in known:
            template.append(known[key])
            continue
        known[key] = len(sections)
        template.append(len(sections))
        solved = tuple(
            event.with_sizes(_solve_each(solve, [other[j].sizes for _, other in same])) for j, event in enumerate(events)
        )
        ops = [_op(solve, [other.ops[j] for other, _ in same], lengths) for j in range(len(raw.ops))]
        sections.append(Section(solved, _sum_pointwise(ops), Calls(**raw.calls)))
    return Trace(tuple((s.phase, s.unit) for s, _ in shapes[0]), tuple(sections), tuple(template))


def _op(solve: Solve, same: list[Any], lengths: bool) -> Op:
    """One kernel from its work at every shape."""
    flops, moved = (solve(tuple(work[part] for work in same)) for part in (1, 2))
    shapes = [work[3] for work in same]
    if same[0][0] == "attention" and not lengths:
        shapes = [(shape[0], 1, 1) for shape in shapes]
    return Op(same[0][0], flops, moved, _solve_each(solve, shapes))


def _solve_each(solve: Solve, sizes: list[tuple[int, ...]]) -> tuple[Polynomial, ...]:
    return tuple(solve(values) for values in zip(*sizes, strict=True))


def _sum_pointwise(ops: list[Op]) -> tuple[Op, ...]:
    """Matrix products and attention one by one, then all pointwise kernels as one."""
    single = [o for o in ops if o.kind != "pointwise"]
    rest = [o for o in ops if o.kind == "pointwise"]
    if rest:
        flops, moved = (tuple(map(sum, zip(*[getattr(o, part) for o in rest], strict=True))) for part in ("flops", "moved"))
        single.append(Op("pointwise", flops, moved, (), len(rest)))  # type: ignore[arg-type]
    return tuple(single)
