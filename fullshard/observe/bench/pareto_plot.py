"""Memory against throughput, a point a case, with the Pareto front. Needs matplotlib."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fullshard.base.text import count_text
from fullshard.observe.bench.cases import OWN
from fullshard.observe.bench.report import Bench
from fullshard.observe.bench.run_cases import Result

MISSING = "no plot was drawn: pip install 'fullshard[plot]' for matplotlib; the tables are written"
NAMES = ("bench.png", "bench.svg")
COLORS = ("#1b6ca8", "#c2571a", "#3a7d44", "#7a4fa3", "#a8324a", "#5c5c5c", "#a07d00")  # fullshard's first, then each peer's
MARKERS = "osD^vPX"
OFFSETS = [(x, y) for r in (9, 14, 20) for x, y in ((r, r), (-r, r), (r, -r), (-r, -r), (r + 3, 0), (-r - 3, 0), (0, r), (0, -r))]
CLEARANCE = 11  # points between labels, and between a label and another case's mark


def draw(bench: Bench, directory: Path) -> list[Path]:
    """Write the plot as PNG and SVG. Returns their paths; nothing if there is nothing to draw."""
    points = [(bench.memory(r), bench.rate(r), r) for r in bench.measured()]
    known = [(m / (1 << 30), rate, r) for m, rate, r in points if m is not None and rate]
    if not known:
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, max(5.2, 1.2 + 0.22 * len(bench.results))), layout="constrained")
    axes = figure.add_subplot()
    scale = 1.0 if not bench.on_cpu else next(rate for _, rate, _ in known)
    unit, factor = ("GiB", 1) if max(m for m, _, _ in known) >= 1 else ("MiB", 1024)
    places = {r.key: (m * factor, rate / scale) for m, rate, r in known}
    _marks(axes, bench, places)
    _front(axes, bench, places)
    what = "peak resident memory of a rank" if bench.on_cpu else "peak allocated memory of a device"
    axes.set_xlabel(f"{what} ({unit})")
    axes.set_ylabel("tokens/s, relative to the first case" if bench.on_cpu else "tokens/s")
    axes.margins(x=0.08)
    axes.set_ylim(bottom=0, top=max(y for _, y in places.values()) * 1.12)
    if not bench.on_cpu:
        axes.yaxis.set_major_formatter(lambda value, _: count_text(value))
    axes.set_title(f"{bench.about['target']}, {bench.about['ranks']} × {bench.about['hardware']}", fontsize=11)
    axes.grid(alpha=0.25)
    figure.legend(*_legend(axes, bench), loc="outside right upper", fontsize=8, frameon=False)
    _numbers(figure, axes, places, [r.key for r in bench.results])  # last: it needs the final positions
    files = [directory / name for name in NAMES]
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def _systems(bench: Bench) -> list[str]:
    return sorted({r.system for r in bench.results}, key=lambda name: (name != OWN, name))


def _style(bench: Bench, result: Result) -> dict[str, Any]:
    i = _systems(bench).index(result.system)
    return {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}


def _marks(axes: Any, bench: Bench, places: dict[str, tuple[float, float]]) -> None:
    for r in bench.measured():
        if r.key in places:
            axes.plot(*places[r.key], linestyle="none", markersize=7, zorder=3, **_style(bench, r))


def _front(axes: Any, bench: Bench, places: dict[str, tuple[float, float]]) -> None:
    front = [places[r.key] for r in bench.front() if r.key in places]
    xs, ys = zip(*front, strict=True)
    axes.step(xs, ys, where="post", color="#222222", linewidth=1.4, linestyle="--", zorder=2, label="Pareto front")


def _numbers(figure: Any, axes: Any, places: dict[str, tuple[float, float]], order: list[str]) -> None:
    """The number of each case beside its mark, where no other number or mark is."""
    figure.canvas.draw()  # for the positions in pixels
    marks = {key: axes.transData.transform(place) * 72 / figure.dpi for key, place in places.items()}
    taken: list[tuple[float, float]] = []
    for key in sorted(marks, key=order.index):
        x, y = marks[key]
        others = [m for other, m in marks.items() if other != key]
        dx, dy = _free_place(x, y, [*taken, *others])
        taken.append((x + dx, y + dy))
        number = str(order.index(key) + 1)
        axes.annotate(
            number, places[key], (dx, dy), textcoords="offset points", ha="center", va="center", fontsize=8, zorder=4,
            bbox={"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.75},
        )  # fmt: skip


def _free_place(x: float, y: float, taken: list[tuple[float, float]]) -> tuple[int, int]:
    """The first of OFFSETS with the fewest labels and marks around it."""

    def crowded(offset: tuple[int, int]) -> int:
        return sum(max(abs(x + offset[0] - a), abs(y + offset[1] - b)) < CLEARANCE for a, b in taken)

    return min(OFFSETS, key=crowded)


def _legend(axes: Any, bench: Bench) -> tuple[list[Any], list[str]]:
    """A line for each case by its number, and the front. What has no point says why."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    for i, r in enumerate(bench.results, 1):
        ran = r.outcome == "ok"
        style = _style(bench, r) if ran else {"color": "#aaaaaa", "marker": "x"}
        handles.append(Line2D([], [], linestyle="none", markersize=6, **style))
        labels.append(f"{i}  {bench.label(r)}" + ("" if ran else f": {r.outcome}"))
    return handles, labels
