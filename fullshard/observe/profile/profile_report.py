"""A profile's summary as text for people."""

from typing import Any

from fullshard.base.text import bytes_text, counted, rate_text, seconds_text, table
from fullshard.observe.profile.breakdown import LANES
from fullshard.observe.profile.recommend import LANE_WORDS

UNITS = 12  # rows of a table of units; the rest is in breakdown.json
NOTABLE = 0.02  # of a step: exposed or idle time below it is not told as a finding
BUSY_WORDS = {"compute": "compute", "gather": "gathers", "reduce": "reduce-scatters", "all_reduce": "all-reduces"}


def report(profile: dict[str, Any]) -> str:
    """The whole report of a `breakdown.json`."""
    steps = profile["steps"]
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    ranks = counted(profile["world"], f"{profile['device']} rank")
    head = f"{which} on {ranks} of {profile['engine']}: {_time(profile['step_seconds'])} a step"
    parts = [head, *_findings(profile), _lanes(profile), _busy(profile), _ranks(profile), _units(profile), _collectives(profile)]
    parts += [_kernels(profile), _memory(profile), _phases(profile), recommendation_text(profile)]
    return "\n\n".join(part for part in parts if part) + "\n"


def recommendation_text(profile: dict[str, Any]) -> str:
    """The recommendation as a sentence."""
    best = profile["recommendation"]
    if best is None:
        tried = "no change that was tried is expected to save 1% of a step"
        unknown = '; the costs of the model are unknown, so no other plan was tried (they are known with plan = "auto")'
        return f"recommendation: none; {tried}{'' if profile['predicted'] else unknown}"
    saves = f"{_time(best['saves_seconds'])} ({best['saves_share']:.0%}) of a step"
    return f"recommendation: {best['change']}. {best['why'].capitalize()}. Predicted saving: {saves}"


def _findings(profile: dict[str, Any]) -> list[str]:
    """What stands out: a slow rank, the unit whose collectives are exposed, data."""
    step, lines = profile["step_seconds"], []
    slow = profile["slowest"]
    if slow and slow["slow"]:
        where = f" in unit {slow['unit']}" if slow["unit"] else ""
        lines.append(
            f"rank {slow['rank']} is slow: {_time(slow['own_seconds'])} of its own a step, the others "
            f"{_time(slow['others_seconds'])}; the difference is {LANE_WORDS[slow['lane']]}{where}"
        )
    for cause, words in (("gather", "gather"), ("reduce", "reduction"), ("transfers", "transfer")):
        unit = max(profile["units"], key=lambda u: u.get(f"{cause}_exposed", 0.0), default=None)
        if unit and (exposed := unit.get(f"{cause}_exposed", 0.0)) > NOTABLE * step:
            lines.append(
                f"the {words} of unit {unit['unit']} is the most exposed: compute waits {_time(exposed)} a step for it, "
                f"{exposed / unit[cause]:.0%} of its time"
            )
    wait = max(r["lanes"]["data"] for r in profile["ranks"])
    if wait > NOTABLE * step:
        rank = max(profile["ranks"], key=lambda r: r["lanes"]["data"])["rank"]
        lines.append(f"the step waits for data: {_time(wait)} ({wait / step:.0%}) on rank {rank}")
    return ["\n".join(lines)] if lines else []


def _lanes(profile: dict[str, Any]) -> str:
    step, predicted = profile["step_seconds"], profile["predicted"]
    rows = []
    for lane in LANES:
        seconds = profile["lanes"][lane]
        row = [LANE_WORDS[lane], _time(seconds), f"{seconds / step:.1%}"]
        rows.append(row + ([_time(predicted["lanes"][lane])] if predicted else []))
    rows.append(["a step", _time(step), "100.0%"] + ([_time(predicted["step_seconds"])] if predicted else []))
    header = ["where the time goes (mean of ranks)", "measured", ""] + (["predicted"] if predicted else [])
    overlap = profile["overlap"]
    note = "" if overlap is None else f"\n{overlap:.0%} of communication overlaps compute"
    return table(header, rows, right=(1, 2, 3)) + note


def _busy(profile: dict[str, Any]) -> str:
    predicted = profile["predicted"]
    if not predicted:
        return ""
    rows = [
        [BUSY_WORDS[k], _time(profile["busy"].get(k, 0.0)), _time(predicted["busy"].get(k, 0.0))]
        for k in BUSY_WORDS
        if profile["busy"].get(k) or predicted["busy"].get(k)
    ]
    return table(["busy, overlapped or not", "measured", "predicted"], rows, right=(1, 2))


def _ranks(profile: dict[str, Any]) -> str:
    if len(profile["ranks"]) < 2:
        return ""
    rows = [[str(r["rank"]), *[_time(r["lanes"][lane]) for lane in LANES], _time(r["own_seconds"])] for r in profile["ranks"]]
    header = ["rank", "compute", "exposed comm.", "exposed transf.", "data", "launch gaps", "idle", "its own"]
    return table(header, rows, right=range(1, 8))


def _units(profile: dict[str, Any]) -> str:
    columns = ["forward", "backward", "gather", "gather_exposed", "reduce", "reduce_exposed", "transfers_exposed", "idle"]
    shown = [c for c in columns if any(u.get(c, 0.0) > 0 for u in profile["units"])]
    top = sorted(profile["units"], key=lambda u: -sum(u.get(c, 0.0) for c in shown))[:UNITS]
    if not top:
        return ""
    rows = [[u["unit"], *[_time(u.get(c, 0.0)) for c in shown]] for u in profile["units"] if u in top]
    left = len(profile["units"]) - len(rows)
    note = f"\n{left} more units are in breakdown.json" if left else ""
    return table(["unit", *[c.replace("_", ", ") for c in shown]], rows, right=range(1, len(shown) + 1)) + note


def _collectives(profile: dict[str, Any]) -> str:
    rows = []
    for c in profile["collectives"]:
        rate = rate_text(c["bytes_per_second"], "B/s") if c["bytes_per_second"] else "–"
        rows.append([c["kind"], bytes_text(c["bytes"]), str(c["ranks"]), f"{c['count']:g}", _time(c["seconds"]), rate])
    return table(["collective", "bytes", "ranks", "a step", "each", "achieved"], rows, right=range(1, 6)) if rows else ""


def _kernels(profile: dict[str, Any]) -> str:
    rows = [[_short(k["name"]), _time(k["seconds"]), f"{k['count']:g}"] for k in profile["kernels"]]
    return table(["top kernels", "a step", "calls"], rows, right=(1, 2)) if rows else ""


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:59]}…"


def _memory(profile: dict[str, Any]) -> str:
    memory = profile["memory"]
    if not memory:
        return ""
    estimated = memory["estimated_kinds"] or {}
    kinds = dict.fromkeys([*memory["kinds"], *estimated])
    rows = [[k, _bytes(memory["kinds"].get(k)), *([_bytes(estimated.get(k))] if estimated else [])] for k in kinds]
    rows.append(["at once", bytes_text(memory["bytes"]), *([_bytes(memory["estimated_bytes"])] if estimated else [])])
    header = [f"memory at the peak, rank {memory['rank']}", "measured", *(["estimated"] if estimated else [])]
    text = table(header, rows, right=(1, 2))
    if memory["allocator_bytes"]:
        text += f"\nthe allocator's own peak: {bytes_text(memory['allocator_bytes'])}"
    return f"{text}\n\n{_memory_units(memory)}" if memory["units"] else text


def _memory_units(memory: dict[str, Any]) -> str:
    kinds = list(memory["kinds"])
    top = sorted(memory["units"].items(), key=lambda item: -sum(item[1].values()))[:UNITS]
    rows = [[unit, *[_bytes(memory["units"][unit].get(k)) for k in kinds]] for unit in memory["units"] if unit in dict(top)]
    left = len(memory["units"]) - len(rows)
    note = f"\n{left} more units are in breakdown.json" if left else ""
    return table(["bytes by unit", *kinds], rows, right=range(1, len(kinds) + 1)) + note


def _time(seconds: float) -> str:
    return seconds_text(seconds) if seconds > 1e-9 else "–"


def _bytes(n: int | None) -> str:
    return bytes_text(n) if n else "–"


def _phases(profile: dict[str, Any]) -> str:
    memory = profile["memory"]
    if not memory or not memory["phases"]:
        return ""
    rows = [[p["phase"], bytes_text(p["before"]), bytes_text(p["after"])] for p in memory["phases"]]
    return table(["memory around each phase", "before", "after"], rows, right=(1, 2))
