"""A model with fewer of its equal blocks: smaller to predict, and otherwise the same."""

from dataclasses import replace

from fullshard.model.costs import Costs, Trace
from fullshard.model.description import Description


def reduced_description(description: Description, count: int) -> Description:
    """The model with the first `count` of its equal blocks; where blocks differ, of the most numerous kind, with all others."""
    assert description.costs is not None
    dropped = set(max(_equal_blocks(description), key=len, default=[])[count:])
    if not dropped:
        return description
    units = tuple(u for u in description.units if u.name not in dropped)
    return replace(description, units=units, costs=_reduced_costs(description.costs, dropped))


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
    found: dict[object, list[str]] = {}
    for parameters, names in groups.items():
        for name in names:
            work = forward.get(("forward", name))
            found.setdefault((parameters, tuple((o.kind, o.flops) for o in work.ops) if work else ()), []).append(name)
    return list(found.values())


def _reduced_costs(costs: Costs, dropped: set[str]) -> Costs:
    traces = {key: _without(trace, dropped) for key, trace in costs.traces.items()}
    return replace(costs, traces=traces, split={ranks: _reduced_costs(c, dropped) for ranks, c in costs.split.items()})


def _without(trace: Trace, dropped: set[str]) -> Trace:
    kept = [i for i, (_, unit) in enumerate(trace.phases) if unit not in dropped]
    return Trace(tuple(trace.phases[i] for i in kept), trace.sections, tuple(trace.template[i] for i in kept))


def blocks_of(description: Description) -> list[str]:
    """The names of the units that are blocks."""
    return [u.name for u in description.units if u.kind == "block"]
