"""A model with fewer of its equal blocks: smaller to predict, and otherwise the same."""

from collections.abc import Set
from dataclasses import replace

from fullshard.model.costs import Costs, Trace
from fullshard.model.description import Description


def reduced_description(description: Description, count: int) -> Description:
    """The model with the first `count` of its equal blocks; where blocks differ, of the most numerous kind, with all others."""
    assert description.costs is not None
    dropped = set(max(_equal_blocks(description), key=len, default=[])[count:])
    return without_units(description, dropped) if dropped else description


def without_units(description: Description, dropped: Set[str]) -> Description:
    """The model without these units."""
    assert description.costs is not None
    units = tuple(u for u in description.units if u.name not in dropped)
    return replace(description, units=units, costs=_reduced_costs(description.costs, dropped))


def unit_kinds(description: Description, costs: Costs) -> dict[str, tuple[object, ...]]:
    """What units have and compute by these costs: the same of two units that are equal."""
    sections: dict[str, list[int]] = {}
    for trace in costs.traces.values():
        for (_, unit), index in zip(trace.phases, trace.template, strict=True):
            sections.setdefault(unit, []).append(id(trace.sections[index]))
    tensors = {u.name: tuple((p.shape, p.dtype, p.trainable) for p in u.parameters) for u in description.units}
    return {name: (shapes, tuple(sections.get(name, ()))) for name, shapes in tensors.items()}


def _equal_blocks(description: Description) -> list[list[str]]:
    """The names of the blocks, by kind: those with equal parameters and, where these differ, with equal work."""
    groups: dict[object, list[str]] = {}
    for u in description.units:
        if u.kind == "block":
            groups.setdefault(tuple((p.shape, p.dtype, p.trainable) for p in u.parameters), []).append(u.name)
    if len(groups) < 2:
        return list(groups.values())
    assert description.costs is not None
    forward = next(iter(description.costs.traces.values())).by_phase
    blocks: dict[object, list[str]] = {}
    for parameters, names in groups.items():
        for name in names:
            work = forward.get(("forward", name))
            blocks.setdefault((parameters, tuple((o.kind, o.flops) for o in work.ops) if work else ()), []).append(name)
    return list(blocks.values())


def _reduced_costs(costs: Costs, dropped: Set[str]) -> Costs:
    traces = {key: _without(trace, dropped) for key, trace in costs.traces.items()}
    split, spread = ({ranks: _reduced_costs(c, dropped) for ranks, c in axis.items()} for axis in (costs.split, costs.spread))
    return replace(costs, traces=traces, split=split, spread=spread)


def _without(trace: Trace, dropped: Set[str]) -> Trace:
    kept = [i for i, (_, unit) in enumerate(trace.phases) if unit not in dropped]
    return Trace(tuple(trace.phases[i] for i in kept), trace.sections, tuple(trace.template[i] for i in kept))


def blocks_of(description: Description) -> list[str]:
    """The names of the units that are blocks."""
    return [u.name for u in description.units if u.kind == "block"]
