"""From a trace that `jax.profiler` wrote to a `RankTrace` for each device of the process.

An event of a device names an operation of the compiled program. What the engine wrote beside the trace says which unit and
phase that is of, and what a collective moves.
"""

import re
from typing import Any

from fullshard.observe.profile.rank_trace import RankTrace, SpanKind, StepWindow, WorkSpan, totals_by_name
from fullshard.observe.profile.torch_trace import DATA, STEP, complete_events

Event = dict[str, Any]
KINDS: dict[str, SpanKind] = {
    "all_gather": "gather",
    "reduce_scatter": "reduce",
    "all_reduce": "all_reduce",
    "other": "all_to_all",
}
NAMES: dict[str, SpanKind] = {"all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "all_reduce"}
COPIES: dict[str, SpanKind] = {"MemcpyH2D": "to device", "MemcpyD2H": "from device"}
DEVICE = re.compile(r"/device:\w+:(\d+)")  # the name of a process in the trace


def read_jax(document: Event) -> list[RankTrace]:
    """The devices of a trace, in order. Expects what `trace_file` has checked."""
    about = document["fullshard"]
    raw, start = complete_events(document)
    steps = _steps(raw, start)
    on_device = _by_device(raw, _devices(document["traceEvents"]))
    issuing = tuple(_interval(e, start) for e in raw if str(e.get("name")).startswith("PjitFunction"))
    traces = []
    for device in about["devices"]:
        events = on_device.get(device, [])
        spans = tuple(_span(e, start, about["operations"]) for e in events)
        traces.append(
            RankTrace(
                rank=device,
                world=about["world"],
                engine="jax",
                device=about["platform"],
                steps=steps,
                spans=spans,
                issuing=issuing,
                top=totals_by_name((_bare_name(s), s.end - s.begin) for s in spans if s.kind == "compute"),
                about={"held": about.get("held", {})},
            )
        )
    return traces


def _interval(e: Event, start: float) -> tuple[float, float]:
    begin = (e["ts"] - start) * 1e-6
    return begin, begin + e.get("dur", 0) * 1e-6


def _steps(raw: list[Event], start: float) -> tuple[StepWindow, ...]:
    data = [_interval(e, start) for e in raw if e.get("name") == DATA]
    windows = []
    for e in sorted(raw, key=lambda e: e["ts"]):
        if match := STEP.fullmatch(str(e.get("name"))):
            begin, end = _interval(e, start)
            windows.append(StepWindow(int(match[1]), begin, end, tuple(d for d in data if begin <= d[0] < end)))
    return tuple(windows)


def _devices(events: list[Event]) -> dict[Any, int]:
    """Devices by the number of their process in the trace; on a CPU all share one, and events tell their device."""
    names = {e.get("pid"): str(e.get("args", {}).get("name")) for e in events if e.get("name") == "process_name"}
    return {pid: int(match[1]) for pid, name in names.items() if (match := DEVICE.match(name))}


def _by_device(raw: list[Event], devices: dict[Any, int]) -> dict[int, list[Event]]:
    """The operations of each device, without those that only contain others, such as loops."""
    by_device: dict[int, list[Event]] = {}
    stacks: dict[tuple[Any, Any], list[Event]] = {}
    containers: set[int] = set()
    for e in sorted((e for e in raw if _is_work(e)), key=lambda e: (e["ts"], -e.get("dur", 0))):
        stack = stacks.setdefault((e.get("pid"), e.get("tid")), [])
        while stack and stack[-1]["ts"] + stack[-1].get("dur", 0) <= e["ts"]:
            stack.pop()
        containers |= {id(outer) for outer in stack}
        stack.append(e)
        device = devices.get(e.get("pid"), int(e.get("args", {}).get("device_ordinal", 0)))
        by_device.setdefault(device, []).append(e)
    return {device: [e for e in events if id(e) not in containers] for device, events in by_device.items()}


def _is_work(e: Event) -> bool:
    return "hlo_op" in (e.get("args") or {}) or any(word in str(e.get("name")) for word in COPIES)


def _span(e: Event, start: float, operations: dict[str, Event]) -> WorkSpan:
    begin, end = _interval(e, start)
    name = str(e.get("args", {}).get("hlo_op", e.get("name")))
    about = operations.get(name, {})
    kind = KINDS.get(about.get("kind", "")) or _kind_of(name)
    unit, phase = about.get("unit") or None, about.get("phase", "")
    return WorkSpan(begin, end, kind, name, unit, phase, int(about.get("bytes", 0)), int(about.get("ranks", 0)))


def _kind_of(name: str) -> SpanKind:
    return next((kind for word, kind in (NAMES | COPIES).items() if word in name), "compute")


def _bare_name(span: WorkSpan) -> str:
    """The name of an operation without its number."""
    return re.sub(r"[.\d]+$", "", span.name)
