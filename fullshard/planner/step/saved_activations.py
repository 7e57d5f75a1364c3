"""Which tensors a unit's forward leaves behind for its backward: what moves when activations rest away.

As the engine does it (on_torch/offload/activations/hooks.py): small tensors stay, and so does what backward wants back at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from fullshard.plan import Place, Plan
from fullshard.planner.step.phases import PhaseSections, owner

SMALL = 1 << 20  # bytes: less is not worth a copy
VISITS = 2  # units whose activations pass the host at once on their way to disk and back

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Saved:
    """A tensor by the name that replays know it by, and its bytes."""

    owner: str
    tensor: str
    nbytes: int


def saved_tensors(
    moments: PhaseSections, near: dict[str, tuple[str, str]], rows: int, tokens: int
) -> dict[str, tuple[Saved, ...]]:
    """By unit: its own tensors and its input, as far as they are still there when the next unit's forward is done."""
    alive: dict[tuple[str, str], int] = {}
    inside: dict[str, list[str]] = {}  # tensors that a unit's own forward made
    found: dict[str, tuple[Saved, ...]] = {}
    left: str | None = None
    for moment, unit, section in moments:
        if moment in ("leave", "loss", "backward") and left is not None and left != unit:
            found[left] = _kept(left, near[left][0], inside[left], alive)
            left = None
        if moment in ("loss", "backward"):
            break
        if moment == "leave":
            left = unit
        made = inside.setdefault(unit, [])
        for event in section.events:
            key = (owner(event.unit, unit, near), event.tensor)
            if event.action == "free":
                alive.pop(key, None)
            elif event.action == "allocate" and not event.rule:
                alive[key] = event.sizes(rows, tokens)[0]
                if moment in ("enter", "forward") and not event.unit and event.tensor.isdigit():
                    made.append(event.tensor)
    return found


def _kept(unit: str, before: str, made: list[str], alive: dict[tuple[str, str], int]) -> tuple[Saved, ...]:
    keys = [(unit, tensor) for tensor in made] + [(before, "out0")]
    return tuple(Saved(*key, alive[key]) for key in keys if alive.get(key, 0) >= SMALL)


def leads(plan: Plan, row: list[str]) -> dict[str, int]:
    """The units whose activations leave, and for how many units a copy may take: as many as lie before the next of
    them. `row`: all units in the order of forward. The last of all, or the last but one, stays."""
    away = {u.name for u in plan.units if u.home.activations != "device"}
    places = [i for i, name in enumerate(row) if name in away]
    found = [after - place for place, after in pairwise(places)]
    if places and len(row) - places[-1] > 2:
        found.append(found[-1] if found else 1)
    return {row[place]: lead for place, lead in zip(places, found, strict=False)}


class Spilled(Generic[Kind]):
    """Activations that have left the device: how many bytes lie where at most. Those on disk pass the host, a few units' at
    a time."""

    def __init__(self) -> None:
        self.there: dict[tuple[str, str], tuple[int, Kind, Place]] = {}
        self.now: dict[Place, int] = {"host": 0, "disk": 0}
        self.most: dict[Place, int] = {"host": 0, "disk": 0}
        self.filed: dict[str, int] = {}  # by unit

    def add(self, unit: str, place: Place, gone: Mapping[tuple[str, str], tuple[int, Kind]]) -> None:
        """What a unit has saved."""
        for key, (nbytes, kind) in gone.items():
            self.there[key] = (nbytes, kind, place)
            self.now[place] += nbytes
        self.most[place] = max(self.most[place], self.now[place])
        if place == "disk":
            self.filed[unit] = sum(nbytes for nbytes, _ in gone.values())

    def pop(self, key: tuple[str, str]) -> tuple[int, Kind] | None:
        """What lay there under that name, no longer there."""
        found = self.there.pop(key, None)
        if found is None:
            return None
        self.now[found[2]] -= found[0]
        return found[:2]

    @property
    def host(self) -> int:
        """Bytes of the host, at most."""
        return self.most["host"] + min(VISITS, len(self.filed)) * max(self.filed.values(), default=0)
