"""Invalid values and byte changes, as in damaged files or files of an attacker."""

import json
from copy import deepcopy
from random import Random
from typing import Any

RAW = {  # placeholders for JSON that `json.dumps` does not write
    "@huge integer@": "9" * 5000,
    "@deep list@": "[" * 3000 + "]" * 3000,
    "@deeper@": "[" * 100_000 + "]" * 100_000,
    "@half a surrogate@": '"\\ud800"',
    "@not a number@": "NaN",
    "@infinity@": "-Infinity",
}
NUMBERS = [-1, 0, 1, 3, 2**31, 2**32, 2**53 + 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400)]
TEXTS = [
    "",
    ".",
    "..",
    "../../x",
    "/etc/passwd",
    "a\nb",
    "\x1b[2J",
    "\0",
    "x" * 300,
    "x" * 100_000,
    "F32",
    "é\ufdd0",
    "{0}",
    "%s",
]
OTHERS: list[Any] = [None, True, False, 0.5, -0.0, 1e308, [], {}, [[]], [None], {"": {}}, [-1], [0], [2**40, 2**40], [1] * 40]


def value(random: Random) -> Any:
    """Any hostile value."""
    kind = random.choice([NUMBERS, TEXTS, OTHERS, list(RAW)])
    return random.choice(kind)


def near(random: Random, found: Any) -> Any:
    """A slightly wrong value of the same type, or any hostile value."""
    if isinstance(found, bool) or random.random() < 0.4:
        return value(random)
    if isinstance(found, int):
        return random.choice([found - 1, found + 1, -found, found * 2, found * 2**20, found * 2**40])
    if isinstance(found, str):
        return random.choice([found[:-1], found + "x", found.upper(), found * 2, found[::-1]])
    if isinstance(found, list):
        return random.choice([found[:-1], found + found, found[::-1], [found]])
    return value(random)


def mutated(random: Random, tree: Any, times: int = 1) -> Any:
    """A copy of a JSON tree with wrong values, keys and orders."""
    tree = json.loads(json.dumps(tree))
    for _ in range(times):
        node, parents = tree, []
        while isinstance(node, dict | list) and node and (not parents or random.random() < 0.8):
            key = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
            parents.append((node, key))
            node = node[key]
        _change(random, *parents[-1])
    return tree


def _change(random: Random, parent: Any, key: Any) -> None:
    match random.randrange(5):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[random.choice(TEXTS) or "other"] = parent.pop(key)
        case 1:
            parent.insert(key, deepcopy(value(random)))
        case 2:
            other = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            parent[key], parent[other] = parent[other], parent[key]
        case _:
            parent[key] = deepcopy(near(random, parent[key]))  # copied: shared nodes could become a cycle


def text(tree: Any) -> str:
    """A tree as JSON text, with the values that json.dumps does not write."""
    found = json.dumps(tree)
    for word, raw in RAW.items():
        found = found.replace(f'"{word}"', raw)
    return found


def flipped(random: Random, data: bytes, times: int = 1) -> bytes:
    """Bytes with changes: bits flipped, bytes overwritten, removed or repeated."""
    found = bytearray(data)
    for _ in range(times):
        at = random.randrange(len(found) or 1)
        match random.randrange(6):
            case 0 | 1 if found:
                found[at] ^= 1 << random.randrange(8)
            case 2 if found:
                found[at] = random.choice([0, 0x7F, 0x80, 0xFF, 0x5D, 0x28])
            case 3:
                del found[at : at + random.randrange(1, 9)]
            case 4:
                found[at:at] = found[at : at + random.randrange(1, 64)]
            case 5:
                found[at : at + 8] = random.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]).to_bytes(8, "little")
    return bytes(found)
