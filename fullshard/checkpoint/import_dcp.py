"""Directories of `torch.distributed.checkpoint`: the metadata is a pickle, and each chunk a file of `torch.save` inside
a larger one."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.checkpoint.foreign_tensors import Foreign, as_name, as_shape, as_table, below, gathered, known_as
from fullshard.checkpoint.manifest import boxes_overlap
from fullshard.checkpoint.safetensors import ITEM_BYTES, is_count
from fullshard.checkpoint.torch_archive import Archive
from fullshard.checkpoint.torch_pickles import LARGEST_PICKLE, FileTensor, unpickle
from fullshard.checkpoint.unpickler import Inert
from fullshard.checkpoint.untrusted_files import read_small
from fullshard.checkpoint.writer import Source
from fullshard.errors import FullshardError

KIND = "metadata of a DCP checkpoint that is known; save it again with a newer torch"

Where = Mapping[tuple[Any, tuple[int, ...]], Any]  # (tensor, offsets): where its chunk lies
Part = tuple[tuple[int, ...], FileTensor]  # offsets, and the chunk that lies there


def from_dcp(path: Path) -> Foreign:
    file = path / ".metadata"
    metadata = unpickle(read_small(file, LARGEST_PICKLE), str(file))
    archives: list[Archive] = []
    with known_as(file, KIND):
        where = {(_state(k)["fqn"], _offsets(k)): v for k, v in as_table(_state(metadata)["storage_data"]).items()}
        listed = as_table(_state(metadata)["state_dict_metadata"])
        tensors = {n: _state(m) for n, m in listed.items() if m.path.endswith(".TensorStorageMetadata")}
        sources = [_source(path, as_name(n, file), m, where, archives) for n, m in tensors.items()]
    return gathered(sources, archives)


def _state(made: Any) -> Mapping[str, Any]:
    return as_table(made.state)


def _offsets(index: Inert) -> tuple[int, ...]:
    found = _state(index).get("offset")
    return as_shape(found) if found is not None else ()


def _source(path: Path, name: str, about: Mapping[str, Any], where: Where, archives: list[Archive]) -> Source:
    shape, dtype = as_shape(about["size"]), about["properties"].state[0]
    if dtype not in ITEM_BYTES:
        raise FullshardError(f"{path}: {name} is of a dtype that is not known")
    boxes = [(as_shape(_state(c)["offsets"]), as_shape(_state(c)["sizes"])) for c in about["chunks"]]
    _refuse_boxes(path, name, shape, boxes)
    parts = [(at, _chunk(path, name, dtype, sizes, where.get((name, at)), archives)) for at, sizes in boxes]
    return Source(name, dtype, shape, partial(_assemble, shape, dtype, parts))


def _refuse_boxes(path: Path, name: str, shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], ...]]) -> None:
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            raise FullshardError(f"{path}: a chunk of {name} has another number of dims")
        if any(a + n > whole for a, n, whole in zip(offsets, sizes, shape, strict=True)):
            raise FullshardError(f"{path}: a chunk of {name} lies outside it")
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        raise FullshardError(f"{path}: the chunks of {name} do not add up to it")
    if boxes_overlap([(offsets, sizes) for offsets, sizes in boxes if 0 not in sizes]):
        raise FullshardError(f"{path}: chunks of {name} overlap")


def _chunk(path: Path, name: str, dtype: str, sizes: tuple[int, ...], found: Any, archives: list[Archive]) -> FileTensor:
    """A chunk, still in its file, held against what the metadata says of it."""
    if found is None:
        raise FullshardError(f"{path}: its metadata does not say where a chunk of {name} lies; fetch it again")
    about = _state(found)
    if about.get("transform_descriptors"):
        raise FullshardError(f"{path} is compressed; save it again without extensions")
    if not (is_count(about["offset"]) and is_count(about["length"])):
        raise TypeError("no place in a file")
    archive = Archive(below(path, about["relative_path"]), about["offset"], about["length"])
    part = archive.load()
    if not isinstance(part, FileTensor) or part.shape != sizes or part.dtype != dtype:
        raise FullshardError(f"{path}: a chunk of {name} is not what the metadata says")
    archives.append(archive)
    return part


def _assemble(shape: tuple[int, ...], dtype: str, parts: Sequence[Part]) -> bytes | bytearray:
    if len(parts) == 1 and parts[0][1].shape == shape:
        return parts[0][1].read()
    whole = np.zeros(shape, dtype=f"V{ITEM_BYTES[dtype]}")
    for offsets, part in parts:
        box = tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))
        whole[box] = np.frombuffer(part.read(), dtype=whole.dtype).reshape(part.shape)
    return whole.tobytes()
