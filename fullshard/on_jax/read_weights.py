"""Load weights from a directory of safetensors files. Every process reads only the byte ranges of its own shards."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from fullshard.checkpoint.safetensors import SafetensorsDirectory
from fullshard.errors import FullshardError, nearest
from fullshard.on_jax.shardings import Shape

FILE_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class WeightFiles:
    """The safetensors files of a directory, compared with the parameters of a model before memory is allocated.

    `shapes`: of the parameters. `names`: all names of each; a tied one has several.
    """

    def __init__(self, directory: Path, shapes: Mapping[str, Shape], names: Iterable[Sequence[str]]):
        self.files = SafetensorsDirectory(directory)
        known, entries = {n for found in names for n in found}, self.files.entries
        for name, shape in shapes.items():
            if name not in entries:
                raise FullshardError(
                    f"{directory} has no tensor for {name}{nearest(name, list(entries))}: it holds another model"
                )
            if entries[name].shape != shape:
                stored = list(entries[name].shape)
                raise FullshardError(f"{directory}: {name} is {stored}, the model's is {list(shape)}: it holds another model")
            if entries[name].dtype not in FILE_DTYPES:
                raise FullshardError(f"{directory}: {name} is {entries[name].dtype}; save it in bf16 or fp32 first")
        if extra := [n for n in entries if n not in known]:
            raise FullshardError(f"{directory} has {extra[0]}, which this model lacks: it holds another model")

    def arrays(
        self, shapes: Mapping[str, Shape], shardings: Mapping[str, jax.sharding.NamedSharding], dtype: Any
    ) -> dict[str, jax.Array]:
        """The parameters, each device's part read by itself."""
        return {name: self._array(name, shape, shardings[name], dtype) for name, shape in shapes.items()}

    def _array(self, name: str, shape: Shape, sharding: jax.sharding.NamedSharding, dtype: Any) -> jax.Array:
        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            box = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
            found = np.empty([b - a for a, b in box], FILE_DTYPES[self.files.entries[name].dtype])
            self.files.read(name, box, found.reshape(-1).view(np.uint8).data)
            return found.astype(dtype)

        return jax.make_array_from_callback(shape, sharding, read)
