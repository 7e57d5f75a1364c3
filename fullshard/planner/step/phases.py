"""The sections of a micro-batch in order, each unit's under its own remat choice, and whose tensors they speak of."""

from dataclasses import replace

from fullshard.model.costs import Costs, Moment, Section, Trace
from fullshard.plan import Plan, Unit

Moments = list[tuple[Moment, str, Section]]


def moments(plan: Plan, costs: Costs, loss: str) -> Moments:
    """The sections of a micro-batch in order, each unit's under its own remat choice."""
    compute = plan.precision.compute
    base = costs.trace(compute, loss, "none")
    choices = {u.name: _choice(plan, u) for u in plan.units}
    remats = {name: choice for name, choice in choices.items() if choice != "none"}
    if not remats:
        return list(base)
    others: dict[str, Trace] = {r: _remat_trace(costs, compute, loss, r) for r in set(remats.values())}
    found: Moments = []
    near = neighbours(list(base))
    for moment, unit, section in base:
        if unit in remats:
            section = others[remats[unit]].by_moment[moment, unit]
        before = remats.get(near[unit][0]) if unit in near else None
        if before is not None and before != remats.get(unit):
            section = _letting_go(section, others[before].by_moment.get((moment, unit)))
        found.append((moment, unit, section))
    return _freed_once(found, near)


def _letting_go(section: Section, other: Section | None) -> Section:
    """What the unit before leaves behind under its own remat choice goes where it goes there: without remat, autograd
    would hold it. What is let go again later is held until then."""
    frees = [e for e in (other.events if other else ()) if e.action == "free" and e.unit == "<" and e not in section.events]
    return replace(section, events=(*section.events, *frees)) if frees else section


def _choice(plan: Plan, unit: Unit) -> str:
    """Which trace a unit follows."""
    return f"compiled {unit.remat}" if is_compiled(plan, unit) else unit.remat


def is_compiled(plan: Plan, unit: Unit) -> bool:
    """Blocks are, where anything is: units of one module, named after it."""
    return plan.compile and unit.modules == (unit.name,)


def _freed_once(found: Moments, near: dict[str, tuple[str, str]]) -> Moments:
    """A block under remat may hold longer what others let go before: only the last free of a tensor counts."""
    freed: set[tuple[str, str]] = set()
    kept: Moments = []
    for moment, unit, section in reversed(found):
        twice = set()
        for i in range(len(section.events) - 1, -1, -1):
            e = section.events[i]
            if e.action == "free" and (e.unit or not e.tensor.isdigit()):
                name = (owner(e.unit, unit, near), e.tensor)
                if name in freed:
                    twice.add(i)
                freed.add(name)
        if twice:
            section = replace(section, events=tuple(e for i, e in enumerate(section.events) if i not in twice))
        kept.append((moment, unit, section))
    return kept[::-1]


def neighbours(found: Moments) -> dict[str, tuple[str, str]]:
    """The units before and after each, in the order of forward."""
    order = ["", *dict.fromkeys(unit for moment, unit, _ in found if moment == "forward"), ""]
    return {unit: (order[i - 1], order[i + 1]) for i, unit in enumerate(order) if unit}


def owner(word: str, unit: str, near: dict[str, tuple[str, str]]) -> str:
    """Whose tensor an event of `unit` means by `word`."""
    if word == "":
        return unit
    if word in "<>":
        return near[unit][word == ">"]
    return "" if word == "/" else word


def _remat_trace(costs: Costs, compute: str, loss: str, remat: str) -> Trace:
    """Blocks do not know the loss, so that another's trace will do where there is none with this one."""
    known = [of for _, of, choice in costs.traces if choice == remat]
    return costs.trace(compute, loss if loss in known or not known else known[0], remat)
