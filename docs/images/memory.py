"""Draw docs/images/memory.svg: the peak memory of a training step by term, as the planner predicts it.

python docs/images/memory.py
"""

from pathlib import Path

import fullshard as fs

CLUSTER, MODEL, BATCH = fs.Cluster.load("8xh100"), "llama3-8b", fs.Batch(micro_batch=2, sequence=4096)
PRECISION = fs.Precision(compute="bf16")
HOST = fs.Home(optimizer="host")
ROWS = [
    ("ddp", fs.ddp, {}),
    ("zero2", fs.zero2, {}),
    ("zero3", fs.zero3, {}),
    ("zero3, remat", fs.zero3, {"remat": "full"}),
    ("zero3, remat, state on the host", fs.zero3, {"remat": "full", "home": HOST}),
]
TERMS = {  # colour, and the planner's terms that it shows
    "parameters": ("#0072b2", ["params"]),
    "optimizer state": ("#56b4e9", ["optimizer", "staging"]),
    "gathered parameters": ("#e69f00", ["gathered"]),
    "activations": ("#d55e00", ["activations"]),
    "gradients and loss": ("#cc79a7", ["gradients", "whole gradients", "reduce", "loss"]),
}
LEFT, RIGHT, TOP, HEIGHT, STEP = 225, 920, 88, 24, 36  # pixels
GIB = 2**30
SCALE = 2.8  # pixels a GiB


def main() -> None:
    description = fs.presets.describe(MODEL)
    bars, available = [], 0
    for label, strategy, choices in ROWS:
        plan = strategy(description, devices=8, precision=PRECISION, batch=BATCH, compile=True, **choices)
        found = fs.estimate(plan, description, CLUSTER)
        available = found.available
        bars.append((label, found))
        print(f"{label}: {found.device.allocated_bytes / GIB:.1f} GiB, reserved {found.needed / GIB:.1f}, {found.device.terms}")
    Path(__file__).with_suffix(".svg").write_text(draw(bars, available))


def draw(bars: list[tuple[str, fs.Estimate]], available: int) -> str:
    bottom = TOP + STEP * len(bars)
    limit = LEFT + available / GIB * SCALE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{RIGHT}" height="{bottom + 34}" '
        f'viewBox="0 0 {RIGHT} {bottom + 34}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13">',
        f'<rect width="{RIGHT}" height="{bottom + 34}" fill="#ffffff"/>',
        text(16, 26, "Llama 3 8B on 8 H100: peak memory of a step on one GPU, 2 × 4096 tokens, GiB", size=16),
        *legend(),
    ]
    line = f'<path d="M{limit:.1f} {TOP - 8}V{bottom}" stroke="#222222" stroke-width="1.5" stroke-dasharray="5 4"/>'
    rows = [(TOP + STEP * i, *b) for i, b in enumerate(bars)]
    parts += [part for y, _, found in rows for part in bar(found, y)]
    parts += [line, *(words for y, label, found in rows for words in labels(label, found, y))]
    parts.append(text(limit, bottom + 18, f"an H100 of 80 GB: {available / GIB:.1f} GiB may be used", anchor="middle"))
    return "\n".join([*parts, "</svg>", ""])


def legend() -> list[str]:
    parts, x = [], 16.0
    for name, (colour, _) in [*TERMS.items(), ("reserved by the allocator", ("#dddddd", []))]:
        parts += [f'<rect x="{x:.0f}" y="44" width="12" height="12" fill="{colour}"/>', text(x + 18, 55, name)]
        x += 38 + 7.3 * len(name)
    return parts


def bar(found: fs.Estimate, y: int) -> list[str]:
    """The terms side by side, then what the allocator reserves beyond them."""
    x, terms = float(LEFT), found.device.terms
    parts = [f'<rect x="{LEFT}" y="{y}" width="{found.needed / GIB * SCALE:.1f}" height="{HEIGHT}" fill="#dddddd"/>']
    for colour, names in TERMS.values():
        width = sum(terms.get(name, 0) for name in names) / GIB * SCALE
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="{colour}"/>')
        x += width
    return parts


def labels(label: str, found: fs.Estimate, y: int) -> list[str]:
    words = f"{found.device.allocated_bytes / GIB:.1f}, reserved {found.needed / GIB:.1f}"
    return [text(LEFT - 12, y + 17, label, anchor="end"), text(LEFT + found.needed / GIB * SCALE + 8, y + 17, words)]


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "start") -> str:
    halo = 'stroke="#ffffff" stroke-width="4" paint-order="stroke"'
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="#222222" {halo}>{words}</text>'


if __name__ == "__main__":
    main()
