"""Load weights from a directory of safetensors files. Every process reads only the byte ranges of its own shards."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fullshard.base.errors import FullshardError, nearest
from fullshard.checkpoint.safetensors import SafetensorsDirectory
from fullshard.on_jax.tensors.dtypes import FILE_DTYPES, Shape

BASES = ("model.", "transformer.")  # files of a model without its head lack this part of the names
COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")  # in old files; models compute these
FLOATS = ("F64", "F32", "F16", "BF16")


class WeightFiles:
    """The safetensors files of a directory, compared with the parameters of a model before memory is allocated.

    `shapes`: of the parameters. `names`: all names of each; a tied one has several, and files may have any of them.
    """

    def __init__(self, directory: Path, shapes: Mapping[str, Shape], names: Iterable[Sequence[str]]):
        self.files = SafetensorsDirectory(directory)
        entries = self.files.entries
        all_names = [list(found) for found in names]
        taken = {name for found in all_names for name in found}
        spelled = {found[0]: [file for name in found for file in _file_names(name, taken)] for found in all_names}
        self.stored: dict[str, str] = {}  # the name in the files, by that of the parameter
        for name, shape in shapes.items():
            here = [file for file in spelled.get(name, [name]) if file in entries]
            if not here:
                raise FullshardError(
                    f"{directory} has no tensor for {name}{nearest(name, list(entries))}: it holds another model"
                )
            for file in here:
                self._refuse_other(file, shape)
            self.stored[name] = here[0]
        known = {file for files in spelled.values() for file in files}
        if extra := [n for n in entries if n not in known and not COMPUTED.search(n)]:
            raise FullshardError(f"{directory} has {extra[0]}, which this model lacks: it holds another model")

    def _refuse_other(self, file: str, shape: Shape) -> None:
        entry, directory = self.files.entries[file], self.files.directory
        if entry.shape != shape:
            raise FullshardError(
                f"{directory}: {file} is {list(entry.shape)}, the model's is {list(shape)}: it holds another model"
            )
        if entry.dtype not in FLOATS:
            raise FullshardError(f"{directory}: {file} is {entry.dtype}; save it in bf16 or fp32 first")

    def array(self, name: str, shape: Shape, sharding: jax.sharding.NamedSharding, dtype: Any) -> jax.Array:
        """A parameter, each device's part read by itself."""
        file = self.stored[name]
        parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # read once, although several devices have it

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            box = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
            if box not in parts:
                found = np.empty([b - a for a, b in box], FILE_DTYPES[self.files.entries[file].dtype])
                self.files.read(file, box, found.reshape(-1).view(np.uint8).data)
                parts[box] = found.astype(dtype)
            return parts[box]

        return jax.make_array_from_callback(shape, sharding, read)


def _file_names(name: str, taken: Collection[str]) -> list[str]:
    """What files may call a parameter. `taken`: the names of all parameters."""
    bare = [name.removeprefix(base) for base in BASES if name.startswith(base)]
    return [name, *(n for n in bare if n not in taken)]
