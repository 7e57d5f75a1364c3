"""Statistics of a checkpoint's tensors, and the differences between two checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fullshard.checkpoint.manifest import TensorRecord
from fullshard.checkpoint.reader import Checkpoint, type_text


@dataclass(frozen=True)
class Statistics:
    """Statistics of a tensor's finite elements, and how many others it has."""

    mean: float
    std: float
    low: float
    high: float
    nans: int
    infinities: int


def statistics(checkpoint: Checkpoint, name: str) -> Statistics | None:
    """The statistics of a tensor, or None if it has no elements."""
    values = np.asarray(checkpoint.tensor(name)).reshape(-1).astype(np.float64)
    finite = values[np.isfinite(values)]
    if not values.size:
        return None
    nans = int(np.isnan(values).sum())
    with np.errstate(over="ignore", invalid="ignore"):  # sums of the largest fp64 numbers overflow
        mean, std, low, high = (finite.mean(), finite.std(), finite.min(), finite.max()) if finite.size else (np.nan,) * 4
    return Statistics(float(mean), float(std), float(low), float(high), nans, int(values.size - finite.size - nans))


@dataclass(frozen=True)
class Difference:
    """How a tensor differs. `kind` is `only first`, `only second`, `shape`, `dtype` or `values`."""

    name: str
    kind: str
    detail: str
    largest: float | None = None  # absolute difference
    changed: int = 0  # elements


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    """The tensors that differ, sorted by name. Holds two tensors in memory at a time."""
    ours, theirs = a.manifest.tensors, b.manifest.tensors
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            first = name in ours
            yield Difference(name, "only first" if first else "only second", _type(ours[name] if first else theirs[name]))
        elif ours[name].shape != theirs[name].shape:
            yield Difference(name, "shape", f"{_type(ours[name])} → {_type(theirs[name])}")
        elif (difference := _value_difference(name, a, b)) is not None:
            yield difference


def _value_difference(name: str, a: Checkpoint, b: Checkpoint) -> Difference | None:
    """How the values or dtypes of two tensors of one shape differ; None if they are equal."""
    ours, theirs = a.manifest.tensors[name], b.manifest.tensors[name]
    first, second = a.raw(name), b.raw(name)
    if ours.dtype == theirs.dtype and first == second:
        return None
    x, y = _wide(a.tensor(name)), _wide(b.tensor(name))
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(over="ignore", invalid="ignore"):
        gap = np.abs(np.where(same, 0, x - y))
    largest = float(np.nanmax(gap)) if gap.size and not np.all(np.isnan(gap)) else None
    kind = "values" if ours.dtype == theirs.dtype else "dtype"
    detail = _type(ours) if kind == "values" else f"{_type(ours)} → {_type(theirs)}"
    return Difference(name, kind, detail, largest, int((~same).sum()))


def _wide(values: Any) -> Any:
    return np.asarray(values).astype(np.float64)


def _type(record: TensorRecord) -> str:
    return type_text(record.shape, record.dtype)


def field_differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """The differences in step, cursor and metrics."""
    pairs = [(key, getattr(a.manifest, key), getattr(b.manifest, key)) for key in ("step", "cursor", "metrics")]
    return [f"{key}: {x} → {y}" for key, x, y in pairs if x != y]
