"""Where the host was when: which unit, phase and part of FSDP it was in. Read from the ranges of a torch trace."""

import heapq
import re
from collections.abc import Iterable, Sequence

from fullshard.observe.profile.rank_trace import HostPlace, StepWindow

FSDP = re.compile(  # part of FSDP's work, names of the unit's modules; without a name, of the root
    r"FSDP::(all_gather|all_gather_copy_out|pre_forward|post_forward|pre_backward|post_backward\w*)(?: \((.*)\))?"
)


def find_phases(marks: Sequence[tuple[float, str]], steps: Iterable[StepWindow]) -> list[HostPlace]:
    """The phases of each step. A mark is the end of a phase."""
    places = []
    for window in steps:
        begin = max([end for _, end in window.data], default=window.begin)
        for at, phase in marks:
            if begin <= at <= window.end:
                places.append(HostPlace(begin, at, None, phase))
                begin = at
    return places


def find_units(ranges: Sequence[tuple[float, float, str]], names: dict[str, str]) -> list[HostPlace]:
    """Units at work, and FSDP's parts inside. `ranges`: (begin, end, name). `names`: units by their modules' names."""
    places: list[HostPlace] = []
    forward: dict[str, float] = {}
    backward: dict[str, tuple[float, float]] = {}
    for begin, end, label in sorted(ranges):
        if (match := FSDP.fullmatch(label)) is None:
            continue
        part, label = match[1], match[2] or ""
        unit = names.get(label, label or "the root")
        places.append(HostPlace(begin, end, unit, "", part))
        if part == "pre_forward":
            forward.setdefault(unit, begin)  # a unit of several modules begins with each of them
        elif part == "post_forward" and unit in forward:
            places.append(HostPlace(forward.pop(unit), end, unit, "forward"))
        elif part == "pre_backward":
            if unit in backward:
                places.append(HostPlace(*backward[unit], unit, "backward"))
            backward[unit] = (begin, end)
        elif part.startswith("post_backward") and unit in backward:
            backward[unit] = (backward[unit][0], end)
    places += [HostPlace(*interval, unit, "backward") for unit, interval in backward.items()]
    return sorted(places, key=lambda p: (p.begin, -p.end))


def places_at(places: Sequence[HostPlace], times: Sequence[float]) -> list[HostPlace | None]:
    """The innermost place at each of these times: of those that have begun and not ended, the one that began last."""
    innermost: list[HostPlace | None] = [None] * len(times)
    order = sorted(range(len(places)), key=lambda i: places[i].begin)
    active: list[tuple[float, float, int]] = []
    following = 0
    for index in sorted(range(len(times)), key=times.__getitem__):
        at = times[index]
        while following < len(order) and places[order[following]].begin <= at:
            place = places[order[following]]
            heapq.heappush(active, (-place.begin, place.end, order[following]))
            following += 1
        while active and active[0][1] < at:
            heapq.heappop(active)
        innermost[index] = places[active[0][2]] if active else None
    return innermost
