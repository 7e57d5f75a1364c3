"""Sets of time as sorted, disjoint intervals. Knows nothing of traces."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]  # begin, end
Intervals = list[Interval]


def union(parts: Iterable[Interval], holes: float = 0.0) -> Intervals:
    """The time in any of the parts. Holes of up to `holes` between them count too."""
    merged: Intervals = []
    for begin, end in sorted(p for p in parts if p[1] > p[0]):
        if merged and begin <= merged[-1][1] + holes:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(parts: Iterable[Interval]) -> float:
    """Seconds of disjoint intervals."""
    return sum(end - begin for begin, end in parts)


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> Intervals:
    """The time in both of two sets."""
    common: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> Intervals:
    """The time in the first set and not in the second."""
    rest: Intervals = []
    j = 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        k, at = j, begin
        while k < len(second) and second[k][0] < end:
            if second[k][0] > at:
                rest.append((at, second[k][0]))
            at = max(at, second[k][1])
            k += 1
        if at < end:
            rest.append((at, end))
    return rest


def partition(window: Interval, sets: dict[str, Intervals], rest: str) -> dict[str, Intervals]:
    """The window cut into the sets: each moment belongs to the first set that has it, or to `rest`."""
    left: Intervals = [window]
    shares: dict[str, Intervals] = {}
    for name, parts in sets.items():
        shares[name] = intersect(left, parts)
        left = subtract(left, parts)
    return shares | {rest: left}
