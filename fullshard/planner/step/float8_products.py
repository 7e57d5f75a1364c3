"""Sections of blocks whose linear layers multiply in float8: their products, and the casts and memory that these take.

Each of a layer's three products casts both its operands from bf16, with two exceptions. Weights that were gathered in float8 are
not cast again. A compiled block with one scale for each tensor casts an output's gradient once for both products of backward.

Eager, a layer saves its input in bf16. A compiled block without remat does not: backward computes inputs again, and casts them.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from fullshard.model.costs import Event, Op, Phase, Polynomial, Section, constant, evaluate
from fullshard.model.description import Description, UnitDescription
from fullshard.model.float8_weights import computes_in_float8, gathered_in_float8
from fullshard.plan.plan import Plan, Unit
from fullshard.planner.step.phases import PhaseSections, as_compiled, is_compiled, remembered_sections

Shapes = frozenset[tuple[int, ...]]  # of weights, each sorted

# Bytes read and written, and kernels, to cast an element: find the largest, scale, round. Compiled, these are two kernels. Eager,
# each operation is one, and fp32 lies between them.
CAST_BYTES, CAST_KERNELS = {True: 5, False: 33}, {True: 2, False: 11}
# Bytes for each element of the larger operand while it is cast; both operands' float8 is alive while they are multiplied.
CASTING = {True: 0, False: 8}


@dataclass(frozen=True)
class _Layers:
    """The float8 layers of a unit. `weights`: their shapes; `gathered`: those that need no cast. `shares`: whether both products
    of backward take one cast of the output's gradient. `unsaved`: the elements of an input for each token, by the name of the
    weight inside the unit, where inputs are not saved."""

    weights: Shapes
    gathered: Shapes
    compiled: bool
    shares: bool
    unsaved: frozenset[tuple[str, int]]


def step_sections(
    plan: Plan, description: Description, loss: str, engine: str = "torch", *, cast_weights: bool = True
) -> PhaseSections:
    """What a micro-batch of a plan runs, in order: the traced phases, with the products that the plan computes in float8."""
    traced = as_compiled(plan, engine)
    return float8_sections(traced, description, remembered_sections(traced, description, loss), cast_weights=cast_weights)


def float8_sections(plan: Plan, description: Description, sections: PhaseSections, *, cast_weights: bool = True) -> PhaseSections:
    """The sections of a micro-batch with the products of float8 layers as such; unchanged if the plan has none. `cast_weights`:
    False for a lower bound that holds for every layout."""
    if plan.precision.float8 is None:
        return sections
    units = {u.name: u for u in plan.units}
    layers = {d.name: _layers(plan, units[d.name], d, cast_weights) for d in description.units}
    shape = (plan.batch.micro_batch, plan.batch.sequence)
    has_layers = {name for name, found in layers.items() if found.weights}
    inputs = _unsaved_inputs(sections, layers, shape)
    return [
        (phase, unit, _in_float8(_without(phase, section, inputs.get(unit, ())), layers[unit], shape))
        if unit in has_layers
        else (phase, unit, section)
        for phase, unit, section in sections
    ]


def _layers(plan: Plan, unit: Unit, described: UnitDescription, cast_weights: bool) -> _Layers:
    found = [p for p in described.parameters if computes_in_float8(plan, unit, p)]
    whole = [p for p in found if not cast_weights or gathered_in_float8(plan, unit, p)]
    weights, gathered = (frozenset(tuple(sorted(p.shape)) for p in some) for some in (found, whole))
    compiled = is_compiled(plan, unit)
    unsaved = {(p.name.removeprefix(f"{unit.name}."), p.shape[-1]) for p in found if compiled and unit.remat == "none"}
    return _Layers(weights, gathered, compiled, compiled and plan.precision.float8 == "tensorwise", frozenset(unsaved))


@lru_cache(maxsize=4096)
def _in_float8(section: Section, layers: _Layers, shape: tuple[int, int]) -> Section:
    """The section with its products of these layers in float8, a cast of their operands, and the casts' memory."""
    products = {i: pair for i, op in enumerate(section.ops) if (pair := _weight_of(op, layers.weights))}
    if not products:
        return section
    ops = [replace(op, float8=True) if i in products else op for i, op in enumerate(section.ops)]
    nbytes = 0
    for i, pair in products.items():
        op = section.ops[i]
        operands = _operands(op, pair if pair in layers.gathered else None, layers.shares)
        moved = tuple(CAST_BYTES[layers.compiled] * op.count * sum(parts) for parts in zip(*operands, strict=True))
        ops.append(Op("pointwise", constant(0), moved, (), CAST_KERNELS[layers.compiled] * op.count * len(operands)))
        sizes = [evaluate(operand, *shape) for operand in operands]
        nbytes = max(nbytes, sum(sizes) + CASTING[layers.compiled] * max(sizes))
    # For the whole section: its events do not tell when each product runs.
    begin, end = Event("allocate", "float8", size=(constant(nbytes),)), Event("free", "float8")
    return replace(section, ops=tuple(ops), events=(begin, *section.events, end))


def _unsaved_inputs(sections: PhaseSections, layers: dict[str, _Layers], shape: tuple[int, int]) -> dict[str, tuple[Event, ...]]:
    """By unit, the allocations of layers' inputs in forward."""
    forward = {unit: section for phase, unit, section in sections if phase == "forward"}
    backward = {unit: section for phase, unit, section in sections if phase == "backward" and layers[unit].unsaved}
    return {unit: _inputs(forward[unit], section, layers[unit].unsaved, shape) for unit, section in backward.items()}


@lru_cache(maxsize=4096)
def _inputs(
    forward: Section, backward: Section, unsaved: frozenset[tuple[str, int]], shape: tuple[int, int]
) -> tuple[Event, ...]:
    """The allocations of layers' inputs that forward keeps. An input has its layer's size, and backward frees it when it has the
    gradient of the last weight that reads it, and still holds that. One that is freed later has another reader: an output of
    attention, which its own backward reads."""
    kept: dict[str, Event] = {}
    for e in forward.events:
        if e.action == "allocate" and _is_own(e):
            kept[e.tensor] = e
        elif e.action == "free" and not e.unit:
            kept.pop(e.tensor, None)
    features, wanted, found = {f"grad:{name}": size for name, size in unsaved}, 0, []
    for e in backward.events:
        if e.tensor in features:
            wanted = 2 * features[e.tensor] * shape[0] * shape[1] if e.action == "allocate" else 0  # bytes in bf16
        elif e.action == "free" and not e.unit and e.tensor in kept and kept[e.tensor].sizes(*shape) == (wanted,):
            found.append(kept[e.tensor])
            wanted = 0
    return tuple(found)


def _is_own(e: Event) -> bool:
    """True for a tensor of the section's unit without a role."""
    return e.tensor.isdigit() and not e.unit and not e.rule


def _without(phase: Phase, section: Section, inputs: tuple[Event, ...]) -> Section:
    """A section that frees these tensors at the end of forward, and has them again from the start of backward."""
    if phase == "forward" and inputs:
        return _with_events(section, (), tuple(Event("free", e.tensor) for e in inputs))
    return _with_events(section, inputs, ()) if phase == "backward" and inputs else section


@lru_cache(maxsize=4096)
def _with_events(section: Section, first: tuple[Event, ...], last: tuple[Event, ...]) -> Section:
    return replace(section, events=(*first, *section.events, *last))


def _weight_of(op: Op, weights: Shapes) -> tuple[int, ...] | None:
    """The sorted shape of the weight that a product is of, or of whose gradient; None if it is of another tensor."""
    fixed = sorted(p[0] for p in op.shape if not any(p[1:])) if op.kind == "gemm" else []
    pairs = {(fixed[i], fixed[j]) for i in range(len(fixed)) for j in range(i + 1, len(fixed))}
    return next(iter(pairs & weights), None)


def _operands(op: Op, whole: tuple[int, ...] | None, shares: bool) -> list[Polynomial]:
    """The elements of each operand that is cast. `whole`: the shape of a weight that needs no cast. `shares`: a product that sums
    over tokens, which is the gradient of a weight, finds the output's gradient cast already."""
    m, n, k = op.shape
    if shares and any(k[1:]):
        return [_times(k, n)]
    both = [(m, k), (k, n)]
    casts = [_times(a, b) for a, b in both if tuple(sorted((a[0], b[0]))) != whole or any((*a[1:], *b[1:]))]
    return casts or [_times(m, k)]


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    """The product of two sizes, of which one is constant."""
    a, b = (b, a) if any(a[1:]) else (a, b)
    return tuple(a[0] * part for part in b)  # type: ignore[return-value]
