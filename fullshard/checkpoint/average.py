"""Averages the weights of several checkpoints, a tensor at a time."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.commit import find
from fullshard.checkpoint.directories import Local, Place
from fullshard.checkpoint.reader import Checkpoint, refuse_mismatch
from fullshard.checkpoint.verify import refuse_damaged
from fullshard.checkpoint.writer import TensorSource, write_checkpoint

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ""}  # safetensors dtype: numpy's, which has no bf16


def average(inputs: Sequence[str], checkpoint_dir: Local) -> Place:
    """Write a checkpoint of the mean weights of `inputs`, without optimizer state, named after the newest one's step."""
    if len(inputs) < 2:
        raise FullshardError("an average needs two checkpoints or more")
    places = [find(i) for i in inputs]
    for place in places:
        refuse_damaged(place)
    opened = [Checkpoint(p) for p in places]
    weights = [{n: t for n, t in c.manifest.tensors.items() if n.startswith("model.")} for c in opened]
    for c, records in zip(opened[1:], weights[1:], strict=True):
        refuse_mismatch(str(c.place), records, {n: (t.shape, t.dtype) for n, t in weights[0].items()})
    sources = [TensorSource(n, t.dtype, t.shape, partial(_mean, opened, n)) for n, t in weights[0].items()]
    newest = max((c.manifest for c in opened), key=lambda m: m.step)
    state = {"averaged": [c.manifest.step for c in opened], "without_slots": "all", "extra": {}}
    return write_checkpoint(checkpoint_dir, sources, step=newest.step, plan=newest.plan, recipe=newest.recipe, state=state)


def _mean(opened: Sequence[Checkpoint], name: str) -> bytes:
    record = opened[0].manifest.tensors[name]
    if record.dtype not in FLOATS:
        first = opened[0].raw(name)
        if any(c.raw(name) != first for c in opened[1:]):
            raise FullshardError(f"{name} is {record.dtype} and differs between the checkpoints: it cannot be averaged")
        return bytes(first)
    total = np.asarray(opened[0].tensor(name), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        for c in opened[1:]:
            total = total + np.asarray(c.tensor(name), dtype=np.float64)
    return cast_floats(total / len(opened), record.dtype)


def cast_floats(values: NDArray[np.float64] | NDArray[np.float32], dtype: str) -> bytes:
    """The bytes of `values` in a floating-point dtype."""
    with np.errstate(over="ignore", invalid="ignore"):  # values that are too large become infinite
        return cast_to_bf16(values.astype(np.float32)) if dtype == "BF16" else values.astype(FLOATS[dtype]).tobytes()


def cast_to_bf16(values: NDArray[np.float32]) -> bytes:
    """Round fp32 to bf16: to nearest, ties to even, as torch does. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype="<f4").view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2").tobytes()
