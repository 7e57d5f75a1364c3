"""The tensors that a unit's forward saves for its backward: what moves when activations leave the device.

The engine (on_torch/offload/activations/hooks.py) follows the same rules: small tensors stay, and so do those that backward
needs at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from fullshard.plan.plan import HomeName, Plan
from fullshard.planner.step.phases import PhaseSections, owner

SMALL = 1 << 20  # bytes: smaller tensors stay on a GPU, as a copy does not pay
UNITS_IN_TRANSIT = 2  # units whose activations are in host memory at once, between device and disk

Payload = TypeVar("Payload")


@dataclass(frozen=True)
class Saved:
    """A saved tensor: its name in replays, and its bytes."""

    owner: str
    tensor: str
    nbytes: int


def saved_tensors(
    phases: PhaseSections, near: dict[str, tuple[str, str]], rows: int, tokens: int
) -> dict[str, tuple[Saved, ...]]:
    """By unit: its own tensors and its input, if they are still alive after the next unit's forward."""
    alive: dict[tuple[str, str], int] = {}
    inside: dict[str, list[str]] = {}  # tensors that a unit's own forward made
    found: dict[str, tuple[Saved, ...]] = {}
    left: str | None = None
    for phase, unit, section in phases:
        if phase in ("leave", "loss", "backward") and left is not None and left != unit:
            found[left] = _kept(left, near[left][0], inside[left], alive)
            left = None
        if phase in ("loss", "backward"):
            break
        if phase == "leave":
            left = unit
        made = inside.setdefault(unit, [])
        for event in section.events:
            key = (owner(event.unit, unit, near), event.tensor)
            if event.action == "free":
                alive.pop(key, None)
            elif event.action == "allocate" and not event.rule:
                alive[key] = event.sizes(rows, tokens)[0]
                if phase in ("enter", "forward") and not event.unit and event.tensor.isdigit():
                    made.append(event.tensor)
    return found


def _kept(unit: str, before: str, made: list[str], alive: dict[tuple[str, str], int]) -> tuple[Saved, ...]:
    keys = [(unit, tensor) for tensor in made] + [(before, "out0")]
    return tuple(Saved(*key, alive[key]) for key in keys if alive.get(key, 0) >= SMALL)


def leads(plan: Plan, row: list[str]) -> dict[str, int]:
    """The units whose activations leave the device, and the number of units that a copy may take: those before the next unit
    that spills. `row`: all units in forward order. The last unit, or the last but one, stays: backward needs it at once."""
    chosen = {u.name for u in plan.units if u.home.activations != "device"}
    places = [i for i, name in enumerate(row) if name in chosen]
    found = [after - place for place, after in pairwise(places)]
    if places and len(row) - places[-1] > 2:
        found.append(found[-1] if found else 1)
    return {row[place]: lead for place, lead in zip(places, found, strict=False)}


class SpilledBytes(Generic[Payload]):
    """Peak bytes of spilled activations, by place. Those on disk pass the host, a few units at a time."""

    def __init__(self) -> None:
        self.there: dict[tuple[str, str], tuple[int, Payload, HomeName]] = {}
        self.now: dict[HomeName, int] = {"host": 0, "disk": 0}
        self.most: dict[HomeName, int] = {"host": 0, "disk": 0}
        self.on_disk: dict[str, int] = {}  # bytes by unit

    def add(self, unit: str, place: HomeName, gone: Mapping[tuple[str, str], tuple[int, Payload]]) -> None:
        """A unit's tensors have left the device."""
        for key, (nbytes, kind) in gone.items():
            self.there[key] = (nbytes, kind, place)
            self.now[place] += nbytes
        self.most[place] = max(self.most[place], self.now[place])
        if place == "disk":
            self.on_disk[unit] = sum(nbytes for nbytes, _ in gone.values())

    def pop(self, key: tuple[str, str]) -> tuple[int, Payload] | None:
        """Remove and return a tensor; None if it is on the device."""
        found = self.there.pop(key, None)
        if found is None:
            return None
        self.now[found[2]] -= found[0]
        return found[:2]

    @property
    def host(self) -> int:
        """Peak bytes of host memory."""
        return self.most["host"] + min(UNITS_IN_TRANSIT, len(self.on_disk)) * max(self.on_disk.values(), default=0)
