"""What a model is made of, without the model: units, tensors, sizes.

An engine's `describe` writes it; strategies and the planner read it. Standard library only.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text, count_text, table
from fullshard.model.costs import Costs
from fullshard.plan.choices import Batch, Sync

ITEM_BYTES = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}

FLOATS = ("fp64", "fp32", "bf16", "fp16")  # dtypes of buffers that a plan may cast

UnitKind = Literal["embed", "block", "experts", "small", "middle", "head", "root"]


@dataclass(frozen=True)
class Tensor:
    """One parameter or buffer. `ties`: other names of the same storage. `linear`: it is the weight of a plain linear layer.
    `outside`: the model uses it while its own module does not run."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    trainable: bool = True
    ties: tuple[str, ...] = ()
    linear: bool = False
    outside: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class UnitDescription:
    """One unit: modules that are sharded together, with their parameters and buffers."""

    name: str
    kind: UnitKind
    modules: tuple[str, ...]
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...] = ()

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def trainable(self) -> int:
        """Elements of the trained parameters."""
        return sum(p.numel for p in self.parameters if p.trainable)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parameters)


@dataclass(frozen=True)
class Description:
    """A model as the planner sees it. Units are in the order of forward, and every parameter is in exactly one.

    `buffers`: of modules outside every unit. `costs`: what a step computes; None if the model was not traced.
    """

    model: str
    units: tuple[UnitDescription, ...]
    buffers: tuple[Tensor, ...] = ()
    costs: Costs | None = field(default=None, repr=False, compare=False)

    @property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @property
    def nbytes(self) -> int:
        return sum(u.nbytes for u in self.units)

    @property
    def trainable(self) -> int:
        return sum(u.trainable for u in self.units)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What was derived from this description and takes long to derive."""
        return {}

    def batch(self, micro_batch: int | None = None, accumulate: int = 1, sync: Sync = "every") -> Batch:
        """The batch of a plan for a model that was described with an example; by default with as many rows."""
        example = self.costs.example if self.costs else None
        if example is None:
            raise FullshardError(f"{self.model} was not described with an example; write Batch(micro_batch, sequence)")
        return Batch(example.rows if micro_batch is None else micro_batch, 1, accumulate, sync, example.dims)

    def to_dict(self) -> dict[str, object]:
        return {
            "model": self.model,
            "parameters": self.numel,
            "trainable": self.trainable,
            "bytes": self.nbytes,
            "units": [
                {
                    "name": u.name,
                    "kind": u.kind,
                    "modules": list(u.modules),
                    "parameters": u.numel,
                    "trainable": u.trainable,
                    "bytes": u.nbytes,
                    "share": u.numel / max(self.numel, 1),
                    "dtypes": sorted({p.dtype for p in u.parameters}),
                    "tied": [[p.name, *p.ties] for p in u.parameters if p.ties],
                    "buffers": [b.name for b in u.buffers],
                }
                for u in self.units
            ],
            "buffers": [b.name for b in self.buffers],
        }

    def __str__(self) -> str:
        rows = [_row(run, self.numel) for run in _runs(self.units)]
        total = ["total", f"{len(self.units)} units", "", count_text(self.numel), bytes_text(self.nbytes), "100.0%"]
        text = table(["unit", "kind", "modules", "parameters", "bytes", "share"], [*rows, total], right=(3, 4, 5))
        return f"{self.model}\n\n{text}{_notes(self)}"


def _row(run: list[UnitDescription], total: int) -> list[str]:
    first, count = run[0], len(run)
    name = first.name if count == 1 else f"{first.name} … {run[-1].name}"
    kind = first.kind if count == 1 else f"{first.kind} ×{count}"
    modules = ", ".join(m or "(root)" for m in first.modules) if count == 1 else "one each"
    numel, nbytes = sum(u.numel for u in run), sum(u.nbytes for u in run)
    return [name, kind, modules, count_text(numel), bytes_text(nbytes), f"{100 * numel / max(total, 1):.1f}%"]


def _notes(description: Description) -> str:
    """Lines on tied, frozen and mixed parameters, after an empty one; nothing if there are none."""
    tensors = [p for u in description.units for p in u.parameters]
    lines = [f"tied: {p.name} = {', '.join(p.ties)}" for p in tensors if p.ties]
    early = [(u.name, p.name) for u in description.units for p in u.parameters if p.outside]
    lines += [f"used outside its module: {name}, gathered by unit {unit}" for unit, name in early]
    if (frozen := description.numel - description.trainable) > 0:
        lines.append(f"frozen: {count_text(frozen)} of {count_text(description.numel)} parameters")
    if len(dtypes := {p.dtype for p in tensors}) > 1:
        lines.append(f"dtypes: {', '.join(sorted(dtypes))}")
    return "".join(f"\n{line}" for line in ["", *lines]) if lines else ""


def _runs(units: tuple[UnitDescription, ...]) -> Iterator[list[UnitDescription]]:
    """Runs of neighbouring blocks of the same size; every other unit alone."""
    run: list[UnitDescription] = []
    for unit in units:
        same = run and (run[0].kind, run[0].nbytes, len(run[0].modules)) == (unit.kind, unit.nbytes, len(unit.modules))
        if run and not (same and unit.kind == "block"):
            yield run
            run = []
        run.append(unit)
    if run:
        yield run
