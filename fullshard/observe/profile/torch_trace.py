"""From a Chrome trace that `torch.profiler` wrote to a `RankTrace`, of a GPU or of a CPU over gloo.

On a GPU the device's work is its kernels and copies, and the launch of each tells its unit. On a CPU the operators are the work,
and a collective lasts from its operator's start to the end of gloo's part of it.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from fullshard.observe.profile.collective_events import input_elements, is_operator, kernel_size, kind_of, operator_size
from fullshard.observe.profile.host_places import find_phases, find_units, places_at
from fullshard.observe.profile.rank_trace import Allocation, HostPlace, RankTrace, SpanKind, StepWindow, WorkSpan, totals_by_name

Event = dict[str, Any]
STEP = re.compile(r"fullshard\.step (\d+)")
DATA, MARK = "fullshard.data", "fullshard.end "
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
COPIES: dict[str, SpanKind] = {"HtoD": "to device", "DtoH": "from device"}
NO_WORK = ("c10d", "_c10d_functional", "autograd", "profiler")  # namespaces of operators that compute nothing themselves


@dataclass(frozen=True)
class _Event:
    """A range of the trace in seconds since the first step."""

    begin: float
    end: float
    name: str
    cat: str
    thread: Any
    args: Event


def complete_events(document: Event) -> tuple[list[Event], float]:
    """The ranges of a trace, and when its first step began."""
    raw = [e for e in document["traceEvents"] if e.get("ph") == "X" and isinstance(e.get("ts"), int | float)]
    return raw, min(e["ts"] for e in raw if STEP.fullmatch(str(e.get("name"))))


def read_torch(document: Event) -> RankTrace:
    """The rank of a trace. Expects what `trace_file` has checked."""
    raw, start = complete_events(document)
    events = sorted((_event(e, start) for e in raw), key=lambda e: (e.begin, -e.end))
    about = document.get("fullshard", {})
    steps = _steps(events)
    marks = [(e.begin, e.name.removeprefix(MARK)) for e in events if e.cat == "user_annotation" and e.name.startswith(MARK)]
    phases = find_phases(marks, steps)
    places = find_units([(e.begin, e.end, e.name) for e in events if e.cat == "user_annotation"], about.get("units", {}))
    on_gpu = any(e.cat == "kernel" for e in events)
    world = int(document.get("distributedInfo", {}).get("world_size", about.get("world", 1)))
    kernels = ((e.name, e.end - e.begin) for e in events if e.cat == "kernel" and not e.name.startswith("nccl"))
    placed = _gpu_spans(events) if on_gpu else _cpu_spans(events, world)
    return RankTrace(
        rank=int(about.get("rank", 0)),
        world=world,
        engine="torch",
        device="cuda" if on_gpu else "cpu",
        steps=steps,
        spans=tuple(_with_units(placed, phases, places)),
        issuing=tuple((e.begin, e.end) for e in events if _issues(e)),
        top=totals_by_name(kernels) if on_gpu else _top_operators(events),
        phases=tuple(phases),
        places=tuple(places),
        allocations=tuple(_allocations(document["traceEvents"], start, on_gpu)),
        about=about,
    )


def _event(e: Event, start: float) -> _Event:
    begin = (e["ts"] - start) * 1e-6
    args = e.get("args")
    return _Event(
        begin, begin + max(0.0, e.get("dur", 0)) * 1e-6, str(e.get("name")), str(e.get("cat")), e.get("tid"), args or {}
    )


def _steps(events: list[_Event]) -> tuple[StepWindow, ...]:
    data = [(e.begin, e.end) for e in events if e.name == DATA and e.cat == "user_annotation"]
    windows = []
    for e in events:
        if e.cat == "user_annotation" and (match := STEP.fullmatch(e.name)):
            inside = tuple(d for d in data if e.begin <= d[0] < e.end)
            windows.append(StepWindow(int(match[1]), e.begin, e.end, inside))
    return tuple(windows)


def _issues(e: _Event) -> bool:
    """Whether the host issues work in it, rather than waiting for some."""
    return e.cat == "cpu_op" or (e.cat in LAUNCHES and "Synchronize" not in e.name)


def _with_units(placed: list[tuple[WorkSpan, float]], phases: list[HostPlace], places: list[HostPlace]) -> Iterator[WorkSpan]:
    """The spans with the unit and phase in which the host issued them."""
    times = [at for _, at in placed]
    for (span, _), phase, unit in zip(placed, places_at(phases, times), places_at(places, times), strict=True):
        inside = phase.phase if phase else ""
        yield WorkSpan(span.begin, span.end, span.kind, span.name, unit.unit if unit else None, inside, span.nbytes, span.ranks)


# -- a GPU ---------------------------------------------------------------------------------------------------


def _gpu_spans(events: list[_Event]) -> list[tuple[WorkSpan, float]]:
    """The device's work, each with the time at which the host launched it."""
    launched = {e.args.get("correlation"): e.begin for e in events if e.cat in LAUNCHES}
    spans = []
    for e in events:
        if e.cat in ON_DEVICE:
            span = _gpu_span(e)
            spans.append((span, launched.get(e.args.get("correlation"), e.begin)))
    return spans


def _gpu_span(e: _Event) -> WorkSpan:
    if e.cat == "gpu_memcpy":
        way = next((word for word in COPIES if word in e.name), None)
        kind: SpanKind = COPIES[way] if way else "compute"
        return WorkSpan(e.begin, e.end, kind, e.name, nbytes=int(e.args.get("bytes", 0)))
    if e.cat == "kernel" and (e.name.startswith("nccl") or "Collective name" in e.args):
        kind = kind_of(str(e.args.get("Collective name", e.name)))
        nbytes, ranks = kernel_size(e.args)
        return WorkSpan(e.begin, e.end, kind, e.name, nbytes=nbytes, ranks=ranks)
    return WorkSpan(e.begin, e.end, "compute", e.name)


# -- a CPU ---------------------------------------------------------------------------------------------------


def _cpu_spans(events: list[_Event], world: int) -> list[tuple[WorkSpan, float]]:
    """Outermost operators, and collectives from their operator's start to the end of gloo's part."""
    spans: list[tuple[WorkSpan, float]] = []
    until: dict[Any, float] = {}  # by thread, the end of the operator that its next ones may lie in
    for e in events:
        if e.cat == "cpu_op" and _computes(e.name) and e.begin >= until.get(e.thread, -1.0):
            until[e.thread] = e.end
            spans.append((WorkSpan(e.begin, e.end, "compute", e.name), e.begin))
    operators = [e for e in events if e.cat == "cpu_op" and is_operator(e.name)]
    parts = _parts_of(operators, [e for e in events if e.name.startswith("gloo:")])
    spans += [(_collective(e, part, world), e.begin) for e, part in zip(operators, parts, strict=True)]
    return spans


def _parts_of(operators: list[_Event], parts: list[_Event]) -> Iterator[_Event | None]:
    """Gloo's part of each operator; both are in order of time. The trace has no number that both share, and groups run beside
    one another. So it is the first of its kind and size that begins after the operator."""
    waiting: dict[tuple[str, int], deque[_Event]] = defaultdict(deque)
    for part in parts:
        waiting[kind_of(part.name), max(input_elements(part.args), default=0)].append(part)
    for e in operators:
        sizes = input_elements(e.args)
        kinds = ("reduce", "all_reduce") if (kind := kind_of(e.name)) == "reduce" else (kind,)  # gloo may reduce all, and cut
        queues = [
            waiting[key] for key in product(kinds, {n for n in sizes if n > 1} or {max(sizes, default=0)}) if key in waiting
        ]
        for queue in queues:
            while queue and queue[0].begin < e.begin:  # nor does a later operator begin before it
                queue.popleft()
        first = min((queue for queue in queues if queue), key=lambda queue: queue[0].begin, default=None)
        yield first.popleft() if first else None


def _collective(e: _Event, part: _Event | None, world: int) -> WorkSpan:
    kind = kind_of(e.name)
    nbytes, ranks = operator_size(kind, {"name": e.name, "args": e.args}, world)
    if part is not None and not nbytes:  # of a list of tensors, the operator's own types are not told
        nbytes, ranks = operator_size(kind, {"name": part.name, "args": _doubled(part.args)}, world)
    return WorkSpan(e.begin, max(e.end, part.end if part else e.end), kind, e.name, nbytes=nbytes, ranks=ranks)


def _doubled(args: Event) -> Event:
    """The one input of gloo's part, as an operator that has it as input and output."""
    return {key: value * 2 if isinstance(value, list) else value for key, value in args.items()}


def _computes(name: str) -> bool:
    """Whether an operator is work itself. Nodes of autograd and their hooks are not: collectives wait inside."""
    space, colons, _ = name.partition("::")
    return space not in NO_WORK if colons else "fused" in name


def _top_operators(events: list[_Event]) -> dict[str, tuple[float, int]]:
    """Seconds and calls by operator, without the operators that it calls."""
    totals: dict[str, tuple[float, int]] = {}
    stacks: dict[Any, list[_Event]] = {}
    for e in (e for e in events if e.cat == "cpu_op" and _computes(e.name)):
        stack = stacks.setdefault(e.thread, [])
        while stack and stack[-1].end <= e.begin:
            stack.pop()
        seconds, count = totals.get(e.name, (0.0, 0))
        totals[e.name] = (seconds + e.end - e.begin, count + 1)
        if stack:
            outer, calls = totals[stack[-1].name]
            totals[stack[-1].name] = (outer - (e.end - e.begin), calls)
        stack.append(e)
    return totals


# -- memory --------------------------------------------------------------------------------------------------


def _allocations(events: list[Event], start: float, on_gpu: bool) -> Iterator[Allocation]:
    """What was allocated on the device since the trace began."""
    alive: dict[Any, tuple[float, int]] = {}
    changes = [e for e in events if e.get("name") == "[memory]" and e.get("args", {}).get("Device Type") == int(on_gpu)]
    for e in sorted(changes, key=lambda e: e["ts"]):
        at, nbytes, address = (e["ts"] - start) * 1e-6, int(e["args"].get("Bytes", 0)), e["args"].get("Addr")
        if nbytes > 0:
            alive[address] = (at, nbytes)
        elif address in alive:
            begin, size = alive.pop(address)
            yield Allocation(begin, at, size)
    yield from (Allocation(begin, None, nbytes) for begin, nbytes in alive.values())
