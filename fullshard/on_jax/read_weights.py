"""Load weights from a directory of safetensors files. Every process reads only the byte ranges of its own shards."""

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from fullshard.checkpoint.safetensors import SafetensorsDirectory
from fullshard.errors import FullshardError, nearest

FILE_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def read_weights(directory: Path, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Arrays like `values`, read from files whose tensors have the same names and shapes."""
    files = SafetensorsDirectory(directory)
    for name, value in values.items():
        if name not in files.entries:
            raise FullshardError(
                f"{directory} has no tensor for {name}{nearest(name, list(files.entries))}: it holds another model"
            )
        if files.entries[name].shape != value.shape:
            stored = list(files.entries[name].shape)
            raise FullshardError(f"{directory}: {name} is {stored}, the model's is {list(value.shape)}: it holds another model")
        if files.entries[name].dtype not in FILE_DTYPES:
            raise FullshardError(f"{directory}: {name} is {files.entries[name].dtype}; save it in bf16 or fp32 first")

    def read(name: str, value: jax.Array) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            box = [s.indices(size)[:2] for s, size in zip(index, value.shape, strict=True)]
            found = np.empty([b - a for a, b in box], FILE_DTYPES[files.entries[name].dtype])
            files.read(name, box, found.reshape(-1).view(np.uint8).data)
            return found.astype(value.dtype)

        return jax.make_array_from_callback(value.shape, value.sharding, part)

    return {name: read(name, value) for name, value in values.items()}
