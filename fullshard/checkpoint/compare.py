"""Looking into checkpoints: statistics of a tensor, and what differs between two checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fullshard.checkpoint.manifest import TensorRecord
from fullshard.checkpoint.reader import Checkpoint


@dataclass(frozen=True)
class Statistics:
    """Of the finite elements; `nans` and `infinities` are counted apart."""

    mean: float
    std: float
    low: float
    high: float
    nans: int
    infinities: int


def statistics(checkpoint: Checkpoint, name: str) -> Statistics | None:
    """None for a tensor without elements."""
    values = np.asarray(checkpoint.tensor(name)).reshape(-1).astype(np.float64)
    finite = values[np.isfinite(values)]
    if not values.size:
        return None
    nans = int(np.isnan(values).sum())
    with np.errstate(over="ignore", invalid="ignore"):  # of fp64 at the ends of its range
        mean, std, low, high = (finite.mean(), finite.std(), finite.min(), finite.max()) if finite.size else (np.nan,) * 4
    return Statistics(float(mean), float(std), float(low), float(high), nans, int(values.size - finite.size - nans))


@dataclass(frozen=True)
class Difference:
    """How a tensor differs. `kind`: `only first`, `only second`, `shape`, `dtype` or `values`."""

    name: str
    kind: str
    detail: str
    largest: float | None = None  # absolute difference
    changed: int = 0  # elements


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    """Tensor by tensor, by name; memory for two tensors at a time. Equal ones are left out."""
    ours, theirs = a.manifest.tensors, b.manifest.tensors
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            first = name in ours
            yield Difference(name, "only first" if first else "only second", _kind(ours[name] if first else theirs[name]))
        elif ours[name].shape != theirs[name].shape:
            yield Difference(name, "shape", f"{_kind(ours[name])} → {_kind(theirs[name])}")
        elif (found := _values(name, a, b)) is not None:
            yield found


def _values(name: str, a: Checkpoint, b: Checkpoint) -> Difference | None:
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
    detail = _kind(ours) if kind == "values" else f"{_kind(ours)} → {_kind(theirs)}"
    return Difference(name, kind, detail, largest, int((~same).sum()))


def _wide(values: Any) -> Any:
    return np.asarray(values).astype(np.float64)


def _kind(record: TensorRecord) -> str:
    return f"{record.dtype} {list(record.shape)}"


def small_differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """What differs besides the tensors."""
    pairs = [(key, getattr(a.manifest, key), getattr(b.manifest, key)) for key in ("step", "cursor", "metrics")]
    return [f"{key}: {x} → {y}" for key, x, y in pairs if x != y]
