"""Name the tensors of a trace relative to their unit, so that equal blocks have equal traces."""

from dataclasses import dataclass

from fullshard.model.costs import Action, Event, Polynomial
from fullshard.model.description import Description
from fullshard.on_torch.tracing.recorder import NO_TENSOR, RawSection, Recorder


@dataclass(frozen=True)
class NamedEvent:
    """An event whose tensor has a name. `unit` is the tensor's unit: "" for the section's own, `<` for the previous, `>`
    for the next."""

    action: Action
    tensor: str
    unit: str
    rule: str
    sizes: tuple[int, ...]

    @property
    def shape_free(self) -> tuple[str, ...]:
        """All fields that must not depend on the batch shape."""
        return self.action, self.tensor, self.unit, self.rule

    def with_sizes(self, sizes: tuple[Polynomial, ...]) -> Event:
        """The event with polynomials for its sizes."""
        return Event(self.action, self.tensor, self.unit, sizes, self.rule)


NamedSections = list[tuple[RawSection, list[NamedEvent]]]


def name_tensors(
    recorder: Recorder, sections: list[RawSection], description: Description, stand_ins: dict[str, str]
) -> NamedSections:
    """Each section with its events. A tensor's name is its role, or its number within its unit. Sections of skipped
    blocks get the events of the block that stands for them."""
    order = list(dict.fromkeys(s.unit for s in recorder.sections if s.phase == "forward"))
    names = _names(recorder)
    prefixes = {u.name: f"{u.modules[0]}." for u in description.units}
    named: NamedSections = []
    for section in sections:
        events = (
            []
            if section.unit in stand_ins
            else [
                NamedEvent(action, _short(names[tensor], prefixes), _relation(section.unit, names[tensor][0], order), rule, sizes)
                for action, tensor, rule, sizes in section.events
                if tensor in names
            ]
        )
        named.append((section, events))
    return _fill_skipped(named, stand_ins)


def _names(recorder: Recorder) -> dict[int, tuple[str, str]]:
    """(unit, role or number) of every tensor that is allocated in the trace."""
    names = {NO_TENSOR: ("", ""), **recorder.roles}
    counts: dict[str, int] = {}
    for section in recorder.sections:
        for action, tensor, *_ in section.events:
            if action == "allocate" and tensor not in names:
                counts[section.unit] = counts.get(section.unit, 0) + 1
                names[tensor] = (section.unit, str(counts[section.unit]))
    return names


def _short(name: tuple[str, str], prefixes: dict[str, str]) -> str:
    """A role without the path of its unit."""
    unit, role = name
    return role.replace(prefixes.get(unit, "\0"), "", 1) if role.startswith("grad:") else role


def _relation(mine: str, theirs: str, order: list[str]) -> str:
    if mine == theirs:
        return ""
    if mine in order and theirs in order and abs(order.index(mine) - order.index(theirs)) == 1:
        return "<" if order.index(theirs) < order.index(mine) else ">"
    return theirs or "/"


def _fill_skipped(named: NamedSections, stand_ins: dict[str, str]) -> NamedSections:
    """Replace the sections of skipped blocks by those of the blocks that stand for them."""
    found = {(s.phase, s.unit): (s, events) for s, events in named}
    filled = []
    for section, events in named:
        if section.unit in stand_ins:
            source, events = found[section.phase, stand_ins[section.unit]]
            section = RawSection(section.phase, section.unit, [], source.ops, source.calls)
        filled.append((section, events))
    return filled
