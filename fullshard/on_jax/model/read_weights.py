"""Load weights from a directory of safetensors files. Every process reads only the byte ranges of its own shards."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fullshard.checkpoint.safetensors import SafetensorsDirectory
from fullshard.checkpoint.weight_files import refuse_dtype, refuse_extra, refuse_missing, refuse_shape
from fullshard.on_jax.tensors.dtypes import FILE_DTYPES, Shape
from fullshard.on_jax.tensors.read_boxes import read_boxes

BASES = ("model.", "transformer.")  # files of a model without its head lack this part of the names


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
        here = {name: [file for file in spelled.get(name, [name]) if file in entries] for name in shapes}
        refuse_missing(self.files, [name for name, found in here.items() if not found])
        for name, found in here.items():
            for file in found:
                refuse_shape(self.files, file, entries[file].shape, shapes[name])
                refuse_dtype(self.files, file)
        refuse_extra(self.files, {file for found in spelled.values() for file in found})
        self.stored = {name: found[0] for name, found in here.items()}  # the name in the files, by that of the parameter

    def array(self, name: str, shape: Shape, sharding: jax.sharding.NamedSharding, dtype: Any) -> jax.Array:
        """A parameter, each device's part read by itself."""
        file = self.stored[name]
        stored = FILE_DTYPES[self.files.entries[file].dtype]
        return read_boxes(shape, sharding, stored, lambda box, memory: self.files.read(file, box, memory), dtype)


def _file_names(name: str, taken: Collection[str]) -> list[str]:
    """What files may call a parameter. `taken`: the names of all parameters."""
    bare = [name.removeprefix(base) for base in BASES if name.startswith(base)]
    return [name, *(n for n in bare if n not in taken)]
