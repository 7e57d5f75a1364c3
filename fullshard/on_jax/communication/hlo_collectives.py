"""The collectives of a compiled program, read from its HLO text: kind, bytes, axes of the mesh, how often, and of which unit."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fullshard.plan.plan import Mesh

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "other"]
KINDS: dict[str, CollectiveKind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "other",
    "ragged-all-to-all": "other",
    "collective-permute": "other",
    "collective-broadcast": "other",
}
AXES = ("replicate", "shard", "tensor")
ITEM = {"pred": 1, "c64": 8, "c128": 16}  # bytes; of other dtypes, the bits are in the name: f32, bf16, s8

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = ")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(([^)]*)\)")
_SHAPE = re.compile(r"\b([a-z]+\d*)(?:e\d+m\d+\w*)?\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|calls|to_apply|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_UNIT = re.compile(r"unit\[([^\]]*)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_LISTED_GROUPS = re.compile(r"replica_groups=(?:\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?|\{\{([\d,]+)\})")


@dataclass(frozen=True)
class CompiledCollective:
    """What a collective of a compiled program does to one tensor. `nbytes`: of the whole tensor. `axes`: of the mesh. `times`:
    how often it runs in a step; 1 if the program does not tell. `unit`: whose parameter or gradient it is, or nothing.
    `number`: True if it has no dims: a loss, a norm, a count. `operation`: the collective that it is part of."""

    kind: CollectiveKind
    nbytes: int
    axes: tuple[str, ...]
    times: int
    unit: str
    number: bool = False
    operation: str = ""

    @property
    def step_bytes(self) -> int:
        return self.nbytes * self.times


def collectives_of(text: str, mesh: Mesh) -> list[CompiledCollective]:
    """The collectives of the program with this HLO text, on the devices of a mesh, an entry for each tensor."""
    computations = computations_of(text)
    found: list[CompiledCollective] = []
    for name, times in runs_of(computations).items():
        units = _units(computations[name])
        for line in computations[name]:
            found += _collectives(line, units, times, mesh)
    return found


def operations_of(text: str) -> dict[str, tuple[str, str]]:
    """The unit and the phase of each instruction that a trace may show. A fusion is of the unit that most of its parts are of."""
    computations = computations_of(text)
    found = {}
    for lines in computations.values():
        for line in lines:
            if match := _INSTRUCTION.match(line):
                inside = [part for inner in called(line) if " while(" not in line for part in computations.get(inner, ())]
                found[match[1]] = (unit_in(line) or _most([unit_in(part) for part in inside]), _phase(line))
    return found


def _phase(line: str) -> str:
    """Autodiff writes into the name of an operation whether it is of the backward pass."""
    if "transpose(" in line:
        return "backward"
    return "forward" if "jvp(" in line else ""


def _most(units: list[str]) -> str:
    named = [unit for unit in units if unit]
    return max(dict.fromkeys(named), key=named.count, default="")


def _collectives(line: str, units: dict[str, str], times: int, mesh: Mesh) -> Iterator[CompiledCollective]:
    match = _COLLECTIVE.search(line)
    if match is None:
        return
    kind, operands = KINDS[match[2]], re.findall(r"%([\w.\-]+)", match[4])
    shapes = shapes_in(match[1])
    members, axes = _group(line, mesh)
    if match[3] and kind in ("all_gather", "reduce_scatter"):  # what is started returns (operands, results)
        shapes = shapes[len(operands) : 2 * len(operands)]
    operation = (_INSTRUCTION.match(line) or [""])[1]
    own = unit_in(line)
    for (dtype, dims), operand in zip(shapes, operands, strict=False):
        nbytes = item_bytes(dtype) * math.prod(dims)
        whole = nbytes * members if kind == "reduce_scatter" else nbytes
        yield CompiledCollective(kind, whole, axes, times, units.get(operand) or own, not dims, operation)


def computations_of(text: str) -> dict[str, list[str]]:
    """The lines of each computation of a module. The entry is called `ENTRY`."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            lines = found.setdefault("ENTRY" if line.startswith("ENTRY") else match[1], [])
        else:
            lines.append(line)
    return found


def _units(lines: list[str]) -> dict[str, str]:
    """The unit of each instruction: XLA merges collectives of several units, so what they work on tells it."""
    return {match[1]: unit_in(line) for line in lines if (match := _INSTRUCTION.match(line))}


def unit_in(line: str) -> str:
    """The innermost unit whose scope a text names, or nothing."""
    return (_UNIT.findall(line) or [""])[-1]


def runs_of(computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs in a step."""
    found: dict[str, int] = {}

    def visit(name: str, times: int) -> None:
        found[name] = found.get(name, 0) + times
        for line in computations[name]:
            trips = _TRIPS.search(line) if " while(" in line else None
            for inner in called(line):
                if inner in computations:
                    visit(inner, times * (int(trips[1]) if trips else 1))

    visit("ENTRY", 1)
    return found


def called(line: str) -> Iterator[str]:
    """The computations that an instruction runs."""
    for names in _CALLED.findall(line) if "=%" in line or "={%" in line else ():
        yield from (name.strip().lstrip("%") for name in names.strip("{}").split(","))


def shapes_in(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and the dims of each tensor of a result."""
    return [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in _SHAPE.findall(text)]


def item_bytes(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return ITEM[dtype] if dtype in ITEM else max(1, int(bits[0]) // 8) if bits else 0


# -- which devices work together -------------------------------------------------------------------------------


def axes_of(line: str, mesh: Mesh) -> tuple[str, ...]:
    """The axes of the mesh along which the devices lie that a collective connects."""
    return _group(line, mesh)[1]


def _group(line: str, mesh: Mesh) -> tuple[int, tuple[str, ...]]:
    """The number of devices of a group, and the axes of the mesh along which they lie."""
    group = _first_group(line, mesh.devices)
    places = np.unravel_index(group, (mesh.replicate, mesh.shard, mesh.tensor))
    return len(group), tuple(axis for axis, place in zip(AXES, places, strict=True) if len(set(place.tolist())) > 1)


def _first_group(line: str, devices: int) -> list[int]:
    """The devices of the first group. XLA writes groups as axes of a mesh, as a reshaped range, or as lists."""
    if match := _MESH_GROUPS.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        ids = _range(devices, match[2], match[3]).reshape(list(sizes.values()))
        used = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(match[4])}
        return _along(ids, list(sizes), used)
    if match := _LISTED_GROUPS.search(line):
        if match[4]:
            return _numbers(match[4])
        return [int(i) for i in _range(devices, match[2], match[3]).reshape(_numbers(match[1]))[0]]
    return list(range(devices))


_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")  # a part of an axis: 'axis_0':(2)4, of size 4 below the 2 first


def _along(ids: np.ndarray, names: list[str], used: dict[str, tuple[int, int]]) -> list[int]:
    """The devices that differ from the first along some axes, or parts of them, only."""
    index = []
    for name, size in zip(names, ids.shape, strict=True):
        before, count = used.get(name, (1, 1))
        step = size // (before * count)
        index.append(np.arange(count) * step)
    return [int(i) for i in ids[np.ix_(*index)].reshape(-1)]


def _range(devices: int, dims: str | None, order: str | None) -> np.ndarray:
    ids = np.arange(devices)
    if dims:
        ids = ids.reshape(_numbers(dims))
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
