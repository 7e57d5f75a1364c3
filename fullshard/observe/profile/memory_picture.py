"""A picture of memory at the peak: measured beside estimated by kind, and measured by unit. Needs matplotlib."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME = "memory.svg"
GIB, MIB = 2**30, 2**20
COLOURS = {  # of kinds: those that people with any colour vision tell apart
    "params": "#0072b2",
    "optimizer": "#56b4e9",
    "gathered": "#e69f00",
    "activations": "#d55e00",
    "gradients": "#009e73",
    "whole gradients": "#7fceb9",
    "reduce": "#b8b8b8",
    "loss": "#cc79a7",
    "workspace": "#888888",
    "batch": "#444444",
    "buffers": "#f0e442",
    "temporaries": "#d55e00",
}
MOST = 40  # units that are drawn


def draw_memory(profile: dict[str, Any], directory: Path) -> str:
    """Write the picture. Returns why there is none, or nothing."""
    memory = profile["memory"]
    if not memory or not memory["kinds"]:
        return ""
    if find_spec("matplotlib") is None:
        return f"{NAME} was not drawn: it needs matplotlib; pip install 'fullshard[plot]'"
    from matplotlib.figure import Figure

    scale, unit = (GIB, "GiB") if memory["bytes"] > GIB else (MIB, "MiB")
    bars = [("estimated", memory["estimated_kinds"])] if memory["estimated_kinds"] else []
    bars.append(("measured", memory["kinds"]))
    units = sorted(memory["units"].items(), key=lambda item: -sum(item[1].values()))[:MOST]
    rows = bars + [(name, kinds) for name, kinds in memory["units"].items() if name in dict(units)]
    figure = Figure(figsize=(9, 1.6 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=[len(bars) + 0.6, max(1, len(rows) - len(bars)) + 0.6])
    _bars(axes[0], bars, scale)
    _bars(axes[1], rows[len(bars) :], scale)
    axes[0].set_title(f"Memory of rank {memory['rank']} at the peak of step {profile['step']}")
    axes[1].set_title("measured, by unit", fontsize="medium")
    axes[1].set_xlabel(unit)
    kinds = dict.fromkeys(kind for _, row in rows for kind in row)
    handles = [axes[0].barh(0, 0, color=_colour(kind), label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    figure.savefig(directory / NAME)
    return ""


def _bars(axes: Any, rows: list[tuple[str, dict[str, int]]], scale: int) -> None:
    for y, (_, kinds) in enumerate(rows):
        left = 0.0
        for kind in (*[k for k in COLOURS if k in kinds], *[k for k in kinds if k not in COLOURS]):
            axes.barh(y, kinds[kind] / scale, left=left, color=_colour(kind), height=0.7)
            left += kinds[kind] / scale
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _colour(kind: str) -> str:
    return COLOURS.get(kind, "#999999")
