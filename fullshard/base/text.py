"""Numbers, tables and lists of names as text for people. Knows nothing of plans or models."""

import re
from collections.abc import Sequence

from fullshard.base.errors import FullshardError

WIDTH, LABEL = 80, 12  # columns of a line of text, and of its label


def bytes_text(n: float) -> str:
    """`1.50 GiB`."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB"), " ")


def count_text(n: float) -> str:
    """`1.50B`: decimal units, as parameter counts are quoted."""
    return _scaled(n, 1000, ("", "K", "M", "B", "T"), "")


def _scaled(n: float, base: int, units: tuple[str, ...], gap: str) -> str:
    places = 0
    while units[1:] and round(abs(n), places) >= base:
        n, units, places = n / base, units[1:], 2
    return f"{n:.{places}f}{gap}{units[0]}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A plain-text table: two blanks between columns, a rule under the header.

    `right` lists the columns that hold numbers and are aligned to the right.
    """
    cells = [list(header), *[list(r) for r in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(_align(c, w, i in right) for i, (c, w) in enumerate(zip(row, widths, strict=True))) for row in cells]
    lines.insert(1, "  ".join("─" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


def labelled(label: str, items: Sequence[str]) -> list[str]:
    """`label      item, item`; a line that would be too long is broken between items."""
    lines = [f"{label:<{LABEL - 1}}"]
    for i, item in enumerate(items):
        item += "," if i < len(items) - 1 else ""
        if lines[-1].strip() not in ("", label) and len(lines[-1]) + 1 + len(item) > WIDTH:
            lines.append(" " * (LABEL - 1))
        lines[-1] += f" {item}"
    return lines


def _align(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def counted(n: int, word: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{n} {word}{'' if n == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def first_of(words: Sequence[object], most: int = 1) -> str:
    """`a and 3 more`: the first `most` words, and how many follow."""
    shown = ", ".join(map(str, words[:most]))
    return f"{shown} and {len(words) - most} more" if len(words) > most else shown


def spans(names: Sequence[str]) -> list[str]:
    """Numbered names in short: `layers.0 … layers.30, every 2nd (16)`; other names as they are."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _continues(runs[-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [_span(run) for run in runs]


def _continues(run: list[str], name: str) -> bool:
    """True if `name` has the next number of `run`, by the same step."""
    (stem, last), (other, number) = _numbered(run[-1]), _numbered(name)
    if stem != other or last is None or number is None:
        return False
    return number > last if len(run) == 1 else number - last == _step(run)


def _numbered(name: str) -> tuple[str, int | None]:
    stem, _, number = name.rpartition(".")
    return (stem, int(number)) if number.isdecimal() else (name, None)


def _step(run: list[str]) -> int:
    return (_numbered(run[1])[1] or 0) - (_numbered(run[0])[1] or 0)


def _span(run: list[str]) -> str:
    if len(run) == 1:
        return run[0]
    step = _step(run)
    every = "" if step == 1 else f", every {_ordinal(step)}"
    return f"{run[0]} … {run[-1]}{every} ({len(run)})"


def _ordinal(n: int) -> str:
    teen = n % 100 in (11, 12, 13)
    return f"{n}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def rate_text(n: float, unit: str) -> str:
    """`3.35 TB/s` for the unit `B/s`: decimal units, as rates are quoted."""
    return _scaled(n, 1000, tuple(p + unit for p in ("", "k", "M", "G", "T", "P")), " ")


def seconds_text(n: float) -> str:
    """`1.90 µs`."""
    units, scale = ("ps", "ns", "µs", "ms", "s"), 1e12
    return _scaled(n * scale, 1000, units, " ")


def parse_bytes(text: str) -> int:
    """`24GiB`, `80 GB`, `512MiB` or a plain number, as bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", text, re.I)
    if match is None or not float(match[1]):
        raise FullshardError(f"{text!r} is no amount of memory; write for example 24GiB")
    prefix = (match[2] or "").upper()
    base = 1024 if prefix.endswith("I") else 1000
    return int(float(match[1]) * base ** " KMGT".index(prefix[:1] or " "))
