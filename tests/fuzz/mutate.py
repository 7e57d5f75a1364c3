"""Random changes to valid documents: JSON trees, texts and bytes."""

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

DIGITS, DEEP = "@digits@", "@deep@"  # placeholders for JSON that json.dumps does not write
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400, DIGITS, DEEP,
    0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), "", " ", "a", "0", "1e999", "none", "auto",
    "\0", "\ud800", "\udcff", "\ufdd0", "\u202e", "\x1b[2J", "é", "a" * 3000, "../../etc/passwd", "/dev/zero", "%s%n", "{{1}}",
    [], {}, [[]], [{}], {"": ""}, [None], ["a"], [0, 1], {"a": 1}, [[[[[[[[1]]]]]]]], list(range(300)),
]  # fmt: skip


def tree(random: Random, whole: Any, changes: int | None = None) -> Any:
    """A copy of a JSON tree with a few changes."""
    made = copy.deepcopy(whole)
    for _ in range(changes if changes is not None else random.choice((1, 1, 1, 2, 3, 6))):
        made = _changed(random, made)
    return made


def _changed(random: Random, whole: Any) -> Any:
    inner = _container(random, whole)
    if not inner:
        return random.choice(VALUES)
    keys: list[Any] = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
    key = random.choice(keys)
    match random.randrange(9):
        case 0:
            del inner[key]
        case 1 | 2 | 3:
            inner[key] = copy.deepcopy(random.choice(VALUES))
        case 4:
            inner[key] = _near(random, inner[key])
        case 5:
            inner[key] = random.choice(([inner[key]], {"a": inner[key]}, str(inner[key])))
        case 6 if isinstance(inner, dict):
            inner[random.choice((f"{key}x", str(key).upper(), "", "\0", "__class__", "version"))] = inner[key]
        case 7:
            inner[key] = copy.deepcopy(inner[random.choice(keys)])
        case _ if isinstance(inner, list):
            inner.extend(copy.deepcopy(inner[: random.choice((1, 3, 200))]))
    return whole


def _container(random: Random, whole: Any) -> Any:
    """A random list or object inside the tree."""
    found = whole
    while isinstance(found, dict | list):
        inner = [v for v in (found.values() if isinstance(found, dict) else found) if isinstance(v, dict | list) and v]
        if not inner or random.random() < 0.25:
            return found
        found = random.choice(inner)
    return None


def _near(random: Random, value: Any) -> Any:
    """A slightly different value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return random.choice(
            (value + 1, value - 1, -value, value * 1000, value // 2 + 0.5 if abs(value) < 2**60 else 0, 2 ** random.randrange(80))
        )
    if isinstance(value, float):
        return random.choice((-value, value * 1e300, value / 1e300, int(value) if abs(value) < 1e18 else 0))
    if isinstance(value, str):
        return text(random, value)
    return value


def dump(random: Random, made: Any) -> str:
    """The tree as JSON text, sometimes damaged."""
    deep = random.choice(("[" * 150 + "]" * 150, "[" * 5000, '{"a":' * 3000))
    written = json.dumps(made, ensure_ascii=random.random() < 0.9)
    written = written.replace(f'"{DIGITS}"', "9" * 5000).replace(f'"{DEEP}"', deep)
    return text(random, written) if random.random() < 0.1 else written


FRAGMENTS = (
    "",
    "\0",
    "[" * 2000,
    "{" * 200,
    "9" * 4400,
    '"',
    "\\",
    "\ufeff",
    "\n",
    "NaN",
    "-",
    "e999",
    "\ud83d",
    "é",
    ",",
    "=",
    "''''",
)


def text(random: Random, whole: str) -> str:
    """A text with one change: cut, repeated, or with something inserted."""
    at, to = sorted((random.randrange(len(whole) + 1), random.randrange(len(whole) + 1)))
    return random.choice(
        (
            lambda: whole[:at],
            lambda: whole[:at] + whole[to:],
            lambda: whole[:at] + random.choice(FRAGMENTS) + whole[at:],
            lambda: whole[:to] + whole[at:to] * random.choice((2, 30)) + whole[to:],
            lambda: whole[:at] + chr(random.choice((0, 9, 34, 92, 123, 0x2028, 0xFDD0, 0xD800, 0x1F600))) + whole[at + 1 :],
        )
    )()[:200_000]


def damaged(random: Random, whole: bytes) -> bytes:
    """Bytes with a few changes."""
    made = bytearray(whole)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(made) + 1)
        match random.randrange(5):
            case 0 if made:
                made[at % len(made)] ^= 1 << random.randrange(8)
            case 1 if made:
                made[at % len(made)] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del made[at : at + random.choice((1, 8, 1000))]
            case 3:
                made[at:at] = random.randbytes(random.choice((1, 4, 40)))
            case _:
                made[at : at + 4] = random.choice((b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\xff\xff\xff\xff"))
    return bytes(made)


def written(made: str) -> bytes:
    """Encode as UTF-8. Lone surrogates are encoded too, as a careless writer does."""
    return made.encode(errors="surrogatepass")


def some(random: Random, known: Sequence[Any], most: int) -> list[Any]:
    return [random.choice(known) for _ in range(random.randrange(most + 1))]
