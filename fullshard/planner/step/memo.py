"""What was derived from a description last: plans with the same choices share it, and memory and time of one plan."""

from collections.abc import Callable
from typing import Any, TypeVar

from fullshard.model.description import Description

MOST = 96  # values of a kind; the largest, the operations of a step of many blocks, take about 1 MB

Value = TypeVar("Value")


def remembered(description: Description, kind: str, part: object, choices: tuple[Any, ...], make: Callable[[], Value]) -> Value:
    """What `make` returns, once for each `part` and `choices`. `part`: a plan or a part of it, known by identity: hashing a plan
    takes long."""
    known: dict[Any, tuple[object, Value]] = description.memo.setdefault(kind, {})
    key = (id(part), choices)
    if key not in known:
        made = make()
        if len(known) >= MOST:
            del known[next(iter(known))]
        known[key] = (part, made)  # the part stays alive beside it, so that nothing else gets its id
    return known[key][1]
