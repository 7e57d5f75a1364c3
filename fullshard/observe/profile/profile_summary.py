"""The content of `breakdown.json`: what a profile's traces say together.

Its keys are an interface, described in docs/reference/run.md.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from fullshard.observe.profile.breakdown import LANES, RankBreakdown, break_down, mean_of
from fullshard.observe.profile.memory_at_peak import memory_peak
from fullshard.observe.profile.rank_trace import COLLECTIVES, RankTrace, WorkSpan

VERSION = 1
KERNELS = 10  # of the top ones, how many are told
SLOWER = 0.05  # of a step, by which a rank must be slower than the others to be called slow


def summarize(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """The profile of all ranks, without what the planner predicts."""
    ranks = [break_down(t) for t in traces]
    first = traces[0]
    return {
        "version": VERSION,
        "engine": first.engine,
        "device": first.device,
        "step": first.steps[0].step,
        "steps": [w.step for w in first.steps],
        "world": first.world,
        "step_seconds": statistics.fmean(r.step_seconds for r in ranks),
        "lanes": {lane: statistics.fmean(r.lanes[lane] for r in ranks) for lane in LANES},
        "busy": mean_of([r.busy for r in ranks]),
        "overlap": _overlap(ranks),
        "ranks": [_rank(r) for r in ranks],
        "slowest": slowest(ranks),
        "units": _units(ranks),
        "collectives": _collectives(traces),
        "kernels": _kernels(first),
        "memory": _memory(first),
        "predicted": None,
        "recommendation": None,
    }


def _rank(breakdown: RankBreakdown) -> dict[str, Any]:
    return {
        "rank": breakdown.rank,
        "step_seconds": breakdown.step_seconds,
        "own_seconds": breakdown.own_seconds,
        "lanes": breakdown.lanes,
        "busy": breakdown.busy,
        "overlap": breakdown.overlap,
    }


def _overlap(ranks: Sequence[RankBreakdown]) -> float | None:
    total = sum(r.busy.get("communication", 0.0) for r in ranks)
    return 1 - sum(r.lanes["communication"] for r in ranks) / total if total > 0 else None


def slowest(ranks: Sequence[RankBreakdown]) -> dict[str, Any] | None:
    """The rank that needs the most by itself, and the lane in which it does; None for one rank.

    `slow`: whether it is slower than the others by more than a small share of a step.
    """
    if len(ranks) < 2:
        return None
    last = max(ranks, key=lambda r: r.own_seconds)
    others = [r for r in ranks if r is not last]
    usual = statistics.median(r.own_seconds for r in others)
    more = {
        lane: last.lanes[lane] - statistics.median(r.lanes[lane] for r in others) for lane in LANES if lane != "communication"
    }
    lane = max(more, key=more.__getitem__)
    late = last.own_seconds - usual
    return {
        "rank": last.rank,
        "own_seconds": last.own_seconds,
        "others_seconds": usual,
        "lane": lane,
        "unit": _unit_behind(last, others) if lane in ("compute", "idle") else None,
        "slow": late > SLOWER * last.step_seconds,
    }


def _unit_behind(last: RankBreakdown, others: Sequence[RankBreakdown]) -> str | None:
    """The unit in which a rank takes longer than the others, if one makes up half of the difference."""

    def own(r: RankBreakdown, unit: str) -> float:
        row = r.units.get(unit, {})
        return sum(row.get(part, 0.0) for part in ("forward", "backward", "idle"))

    more = {u: own(last, u) - statistics.median(own(r, u) for r in others) for u in last.units}
    late = last.own_seconds - statistics.median(r.own_seconds for r in others)
    unit = max(more, key=more.__getitem__, default=None)
    return unit if unit is not None and more[unit] > late / 2 else None


def _units(ranks: Sequence[RankBreakdown]) -> list[dict[str, Any]]:
    names = dict.fromkeys(u for r in ranks for u in r.units)
    return [{"unit": name} | mean_of([r.units.get(name, {}) for r in ranks]) for name in names]


def _collectives(traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """Collectives by kind and size. The time of one is that of the rank that came last: the others wait in it."""
    steps = len(traces[0].steps)
    spans = [[s for s in t.spans if s.kind in COLLECTIVES] for t in traces]
    groups: dict[tuple[str, int, int], list[float]] = {}
    for same in zip(*spans, strict=False) if len({len(o) for o in spans}) == 1 else [(s,) for o in spans for s in o]:
        span: WorkSpan = same[0]
        groups.setdefault((span.kind, span.nbytes, span.ranks), []).append(min(s.end - s.begin for s in same))
    rows = []
    for (kind, nbytes, ranks), seconds in sorted(groups.items(), key=lambda item: (item[0][0], -item[0][1])):
        usual = statistics.median(seconds)
        moved = nbytes * _moves(kind, ranks)
        rows.append(
            {
                "kind": kind,
                "bytes": nbytes,
                "ranks": ranks,
                "count": len(seconds) / steps,
                "seconds": usual,
                "bytes_per_second": moved / usual if usual > 0 and moved else None,
            }
        )
    return rows


def _moves(kind: str, ranks: int) -> float:
    """Bytes that each rank sends, as a share of the whole tensor, by the best algorithm."""
    if ranks < 2:
        return 0.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def _kernels(trace: RankTrace) -> list[dict[str, Any]]:
    steps = len(trace.steps)
    top = sorted(trace.top.items(), key=lambda item: -item[1][0])[:KERNELS]
    return [{"name": name, "seconds": seconds / steps, "count": count / steps} for name, (seconds, count) in top]


def _memory(trace: RankTrace) -> dict[str, Any]:
    peak = memory_peak(trace)
    return {
        "rank": trace.rank,
        "bytes": peak.nbytes,
        "allocator_bytes": trace.about.get("peak_bytes"),
        "kinds": dict(sorted(peak.kinds.items(), key=lambda item: -item[1])),
        "units": {unit: row for unit, row in peak.units.items() if any(row.values())},
        "phases": [{"phase": phase, "before": before, "after": after} for phase, before, after in peak.phases],
        "estimated_bytes": None,
        "estimated_kinds": None,
    }
