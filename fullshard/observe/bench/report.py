"""A benchmark's results as a table for people, as Markdown and as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.base.text import bytes_text, count_text, seconds_text, table
from fullshard.observe.bench.axes import Axis
from fullshard.observe.bench.cases import OWN, TITLES, label
from fullshard.observe.bench.run_cases import Result

NONE = "–"
ON_CPU = (
    "On a CPU, bytes sent are counted and exact. Times are relative to the first case that ran, each the mean of the fastest "
    "third of its steps. Memory is the growth of resident memory as the kernel counts it; the prediction is what the step "
    "allocates."
)
PEERS = "Peers compute the plain cross-entropy, as their own examples do; fullshard's default loss is chunked (train.loss)."
SENT = "Sent: bytes that a rank sends in a step, counted from the collectives that ran, as a ring sends them."


@dataclass(frozen=True)
class Bench:
    """A finished benchmark. `about`: what was measured, where and when. `axes`: those with more than one value."""

    about: dict[str, Any]
    axes: tuple[Axis, ...]
    results: tuple[Result, ...]
    tokens: dict[str, int]  # of a step, by case

    @property
    def on_cpu(self) -> bool:
        return str(self.about["hardware"]).startswith("CPU")

    def measured(self) -> list[Result]:
        return [r for r in self.results if r.outcome == "ok"]

    def rate(self, result: Result) -> float | None:
        """Tokens a second, over all ranks."""
        return self.tokens[result.key] / result.seconds if result.seconds else None

    def memory(self, result: Result) -> int | None:
        """Peak bytes of the rank that needs most: allocated ones, or resident ones on a CPU."""
        memory = result.measured.get("memory", {})
        return memory.get("allocated", memory.get("resident"))

    def mfu(self, result: Result) -> float | None:
        m, rate = result.measured, self.rate(result)
        if not (rate and m.get("peak_flops") and m.get("flops_per_token")):
            return None
        return rate * m["flops_per_token"] / (m["peak_flops"] * self.about["ranks"])

    def label(self, result: Result) -> str:
        """A case in a few words."""
        return label(result.system, result.choices, self.axes)

    def front(self) -> list[Result]:
        """The Pareto front: cases than which no other is both faster and smaller, by memory."""
        points = [(self.memory(r), self.rate(r), r) for r in self.measured()]
        known = sorted(((m, -rate, r.key, r) for m, rate, r in points if m is not None and rate), key=lambda p: p[:3])
        front: list[Result] = []
        best = 0.0
        for _, negative, _, result in known:
            if -negative > best:
                best = -negative
                front.append(result)
        return front


# -- the table -------------------------------------------------------------------------------------------------

Cell = Callable[[Result], str]


def columns(bench: Bench) -> list[tuple[str, Cell, bool]]:
    """(title, cell, whether it holds numbers) of every column that says something."""
    rows = list(bench.results)
    system: list[tuple[str, Cell, bool]] = [("system", lambda r: TITLES.get(r.system, r.system), False)]
    axes = [(axis.name, _axis_cell(axis), False) for axis in bench.axes]
    every = [*system, *axes, *_number_columns(bench), ("result", lambda r: "" if r.outcome == "ok" else r.outcome, False)]
    said = [{cell(r) for r in rows} - {NONE, ""} for _, cell, _ in every]
    return [c for c, words in zip(every, said, strict=True) if words and not (c[0] == "system" and words == {OWN})]


def _number_columns(bench: Bench) -> list[tuple[str, Cell, bool]]:
    memory: list[tuple[str, Cell, bool]] = [
        ("peak", lambda r: _bytes(bench.memory(r)), True),
        ("predicted", lambda r: _bytes(r.predicted_memory), True),
        ("off", lambda r: NONE if bench.on_cpu else _off(r.predicted_memory, bench.memory(r)), True),
        ("reserved", lambda r: _bytes(r.measured.get("memory", {}).get("reserved")), True),
    ]
    sent: list[tuple[str, Cell, bool]] = [
        ("sent", lambda r: _bytes(r.measured.get("sent")), True),
        ("predicted", lambda r: _bytes(r.predicted_sent), True),
    ]
    return memory + (_relative_times(bench) if bench.on_cpu else _times(bench)) + sent


def _times(bench: Bench) -> list[tuple[str, Cell, bool]]:
    return [
        ("step", lambda r: _seconds(r.seconds), True),
        ("predicted", lambda r: _seconds(r.predicted_seconds), True),
        ("off", lambda r: _off(r.predicted_seconds, r.seconds), True),
        (f"{bench.about['unit']}/s", lambda r: count_text(rate) if (rate := bench.rate(r)) else NONE, True),
        ("MFU", lambda r: f"{mfu:.1%}" if (mfu := bench.mfu(r)) else NONE, True),
    ]


def _relative_times(bench: Bench) -> list[tuple[str, Cell, bool]]:
    """The time of a token as a ratio to that of the first measured case."""
    first = next((r for r in bench.measured() if r.predicted), next(iter(bench.measured()), None))
    if first is None:
        return []

    def measured(r: Result) -> float | None:
        return _relative(r.seconds, first.seconds, bench.tokens[r.key] / bench.tokens[first.key])

    def predicted(r: Result) -> float | None:
        return _relative(r.predicted_seconds, first.predicted_seconds, bench.tokens[r.key] / bench.tokens[first.key])

    return [
        ("time", lambda r: _ratio(measured(r)), True),
        ("predicted", lambda r: _ratio(predicted(r)), True),
        ("off", lambda r: _off(predicted(r), measured(r)), True),
    ]


def _relative(seconds: float | None, first: float | None, tokens: float) -> float | None:
    return seconds / first / tokens if seconds and first and tokens else None


def _axis_cell(axis: Axis) -> Cell:
    def cell(result: Result) -> str:
        value = result.choices.get(axis.key)
        return NONE if value is None else ("yes" if value else "no") if isinstance(value, bool) else str(value)

    return cell


def _bytes(n: float | None) -> str:
    return NONE if n is None else bytes_text(n)


def _seconds(n: float | None) -> str:
    return seconds_text(n) if n else NONE


def _ratio(n: float | None) -> str:
    return NONE if n is None else f"{n:.2f}×"


def _off(predicted: float | None, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if predicted and measured else NONE


def notes(bench: Bench) -> list[str]:
    """What a reader must know of the numbers, and why cases have none."""
    lines = [SENT]
    if bench.on_cpu:
        lines.append(ON_CPU)
    if any(r.system != OWN and r.outcome == "ok" for r in bench.results):
        lines.append(PEERS)
    seen: dict[tuple[str, str], list[str]] = {}
    for r in bench.results:
        if r.outcome != "ok":
            seen.setdefault((r.outcome, r.why), []).append(bench.label(r))
    lines += [f"{'; '.join(labels)}: {outcome}: {why}" for (outcome, why), labels in seen.items()]
    front = "; ".join(bench.label(r) for r in bench.front())
    return [*lines, f"Pareto front of memory and throughput: {front}"] if front else lines


def text(bench: Bench) -> str:
    """For a terminal."""
    shown = columns(bench)
    numbers = [i for i, (_, _, number) in enumerate(shown) if number]
    body = table([title for title, _, _ in shown], [[cell(r) for _, cell, _ in shown] for r in bench.results], right=numbers)
    return body + "\n\n" + "\n".join(notes(bench))


def markdown(bench: Bench, images: Sequence[str] = ()) -> str:
    """A page with the table, its notes and the plot."""
    a, shown = bench.about, columns(bench)
    lines = [f"# Benchmark of {a['target']}", ""]
    versions = ", ".join(f"{name} {version}" for name, version in a["versions"].items())
    lines += [f"{a['ranks']} × {a['hardware']}; {versions}; {a['date']}.", "", "```text", a["command"], "```", ""]
    lines += [_row([title for title, _, _ in shown]), _row(["---:" if number else "---" for _, _, number in shown])]
    lines += [_row([cell(r) for _, cell, _ in shown]) for r in bench.results]
    lines += ["", *[f"- {note}" for note in notes(bench)]]
    lines += ["", *[f"![Memory against throughput]({name})" for name in images]]
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def to_dict(bench: Bench) -> dict[str, Any]:
    """For programs. Seconds, bytes and tokens a second as measured, on a CPU too."""
    front = {r.key for r in bench.front()}
    rows = []
    for r in bench.results:
        numbers = {"label": bench.label(r), "tokens": bench.tokens[r.key], "tokens_per_second": bench.rate(r)}
        rows.append(r.to_dict() | numbers | {"mfu": bench.mfu(r), "pareto": r.key in front})
    return {"about": bench.about, "axes": {axis.key: list(axis.values) for axis in bench.axes}, "cases": rows}
