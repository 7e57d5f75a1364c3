"""Name the tensors of a trace relative to their unit, so that equal blocks have equal traces."""

from fullshard.model.costs import Calls, Event, Op, Section, Trace
from fullshard.model.description import Description
from fullshard.on_torch.tracing.polynomials import FittedSection, FittedTrace, FittedWork, total
from fullshard.on_torch.tracing.recorder import NO_TENSOR

NamedSections = list[tuple[FittedSection, list[Event]]]


def named_trace(fitted: FittedTrace, sections: list[FittedSection], description: Description, stand_ins: dict[str, str]) -> Trace:
    """The trace of `sections`, which are those of `fitted`, compiled or not. A tensor's name is its role, or its number within
    its unit. Sections of skipped blocks get the events of the block that stands for them."""
    return _assemble(_fill_skipped(_name_tensors(fitted, sections, description, stand_ins), stand_ins))


def _name_tensors(
    fitted: FittedTrace, sections: list[FittedSection], description: Description, stand_ins: dict[str, str]
) -> NamedSections:
    """Each section with its events; none for skipped blocks. The unit of an event's tensor is "" for the section's own, `<` for
    the previous, `>` for the next."""
    order = {unit: i for i, unit in enumerate(dict.fromkeys(s.unit for s in fitted.sections if s.phase == "forward"))}
    names = _names(fitted)
    prefixes = {u.name: f"{u.modules[0]}." for u in description.units}
    named: NamedSections = []
    for section in sections:
        events = (
            []
            if section.unit in stand_ins
            else [
                Event(action, _short(names[tensor], prefixes), _relation(section.unit, names[tensor][0], order), sizes, rule)
                for action, tensor, rule, sizes in section.events
                if tensor in names
            ]
        )
        named.append((section, events))
    return named


def _names(fitted: FittedTrace) -> dict[int, tuple[str, str]]:
    """(unit, role or number) of every tensor that is allocated in the trace."""
    names = {NO_TENSOR: ("", ""), **fitted.roles}
    counts: dict[str, int] = {}
    for section in fitted.sections:
        for action, tensor, *_ in section.events:
            if action == "allocate" and tensor not in names:
                counts[section.unit] = counts.get(section.unit, 0) + 1
                names[tensor] = (section.unit, str(counts[section.unit]))
    return names


def _short(name: tuple[str, str], prefixes: dict[str, str]) -> str:
    """A role without the path of its unit."""
    unit, role = name
    return role.replace(prefixes.get(unit, "\0"), "", 1) if role.startswith("grad:") else role


def _relation(mine: str, theirs: str, order: dict[str, int]) -> str:
    if mine == theirs:
        return ""
    if mine in order and theirs in order and abs(order[mine] - order[theirs]) == 1:
        return "<" if order[theirs] < order[mine] else ">"
    return theirs or "/"


def _fill_skipped(named: NamedSections, stand_ins: dict[str, str]) -> NamedSections:
    """Replace the sections of skipped blocks by those of the blocks that stand for them."""
    found = {(s.phase, s.unit): (s, events) for s, events in named}
    filled = []
    for section, events in named:
        if section.unit in stand_ins:
            source, events = found[section.phase, stand_ins[section.unit]]
            section = FittedSection(section.phase, section.unit, [], source.ops, source.calls)
        filled.append((section, events))
    return filled


def _assemble(named: NamedSections) -> Trace:
    sections: list[Section] = []
    known: dict[tuple[int, int], int] = {}  # blocks that were skipped share events and kernels with the one that stands for them
    template = []
    for section, events in named:
        key = (id(events), id(section.ops))
        if key not in known:
            known[key] = len(sections)
            sections.append(Section(tuple(events), _sum_pointwise(section.ops), Calls(**section.calls)))
        template.append(known[key])
    return Trace(tuple((s.phase, s.unit) for s, _ in named), tuple(sections), tuple(template))


def _sum_pointwise(ops: list[FittedWork]) -> tuple[Op, ...]:
    """Matrix products and attention one by one, then all pointwise kernels as one."""
    single = [Op(*o) for o in ops if o[0] != "pointwise"]
    rest = [o for o in ops if o[0] == "pointwise"]
    if rest:
        single.append(Op("pointwise", total(o[1] for o in rest), total(o[2] for o in rest), (), len(rest)))
    return tuple(single)
