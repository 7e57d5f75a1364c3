"""The allocations of a section of a trace at one batch shape, in bytes."""

from functools import lru_cache

from fullshard.model.costs import Section
from fullshard.planner.memory.allocator import GRAIN

SizedEvent = tuple[str, str, str, int]  # action, tensor, unit, bytes


@lru_cache(maxsize=4096)
def sized_events(section: Section, rows: int, tokens: int) -> tuple[SizedEvent, ...]:
    """The events of a section with their bytes. Each temporary of a kernel is an event of its own."""
    found: list[SizedEvent] = []
    several: dict[str, int] = {}
    for e in section.events:
        if e.rule:
            sizes = e.sizes(rows, tokens)
            several[e.tensor] = len(sizes)
            found += [("allocate", f"{e.tensor}.{i}", e.unit, n) for i, n in enumerate(sizes)]
        elif e.tensor in several:
            found += [("free", f"{e.tensor}.{i}", e.unit, 0) for i in range(several.pop(e.tensor))][::-1]
        else:
            found.append((e.action, e.tensor, e.unit, e.sizes(rows, tokens)[0] if e.size else 0))
    return tuple(found)


@lru_cache(maxsize=4096)
def folded_events(section: Section, rows: int, tokens: int) -> tuple[SizedEvent, ...]:
    """The same, but tensors that live only within the section are one `rise`: their peak between two other events."""
    events = sized_events(section, rows, tokens)
    last = {e[1]: i for i, e in enumerate(events) if e[0] == "free" and not e[2]}
    local: dict[str, int] = {}  # rounded bytes of the section's own tensors that are alive
    found: list[SizedEvent] = []
    now = most = 0
    for i, event in enumerate(events):
        action, tensor, unit, nbytes = event
        if not unit and action == "allocate" and tensor[:1].isdigit() and last.get(tensor, -1) > i and tensor not in local:
            local[tensor] = nbytes // -GRAIN * -GRAIN
            now += local[tensor]
            most = max(most, now)
        elif not unit and action == "free" and tensor in local:
            now -= local.pop(tensor)
        else:
            found += [("rise", "", "", most)] if most else []
            found.append(event)
            most = now
    return tuple([*found, ("rise", "", "", most)] if most else found)
