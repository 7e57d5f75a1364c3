"""Imports directories of `torch.distributed.checkpoint` (DCP).

The file `.metadata` is a pickle. Each chunk is a `torch.save` archive inside a larger file.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fullshard.base.errors import FullshardError
from fullshard.base.untrusted_files import read_small
from fullshard.checkpoint.manifest import boxes_overlap
from fullshard.checkpoint.other_formats.external_checkpoint import (
    ExternalCheckpoint,
    as_name,
    as_shape,
    as_table,
    file_inside,
    from_archives,
    refusing_malformed,
)
from fullshard.checkpoint.other_formats.torch_archive import Archive
from fullshard.checkpoint.other_formats.torch_pickles import LARGEST_PICKLE, FileTensor, unpickle
from fullshard.checkpoint.other_formats.unpickler import Placeholder
from fullshard.checkpoint.safetensors import ITEM_BYTES, is_count
from fullshard.checkpoint.writer import TensorSource

KIND = "the metadata of a known version of DCP; save the checkpoint again with a newer torch"

ChunkLocations = Mapping[tuple[Any, tuple[int, ...]], Any]  # (tensor, offsets): DCP's record of file, offset and length
PlacedChunk = tuple[tuple[int, ...], FileTensor]  # offsets in the whole tensor, and the chunk


def from_dcp(path: Path) -> ExternalCheckpoint:
    file = path / ".metadata"
    metadata = unpickle(read_small(file, LARGEST_PICKLE), str(file))
    archives: list[Archive] = []
    with refusing_malformed(file, KIND):
        locations = {(_state(k)["fqn"], _offsets(k)): v for k, v in as_table(_state(metadata)["storage_data"]).items()}
        listed = as_table(_state(metadata)["state_dict_metadata"])
        tensors = {n: _state(m) for n, m in listed.items() if m.path.endswith(".TensorStorageMetadata")}
        sources = [_source(path, as_name(n, file), m, locations, archives) for n, m in tensors.items()]
    return from_archives(sources, archives)


def _state(placeholder: Any) -> Mapping[str, Any]:
    """The attributes of a pickled object."""
    return as_table(placeholder.state)


def _offsets(index: Placeholder) -> tuple[int, ...]:
    offset = _state(index).get("offset")
    return as_shape(offset) if offset is not None else ()


def _source(
    path: Path, name: str, metadata: Mapping[str, Any], locations: ChunkLocations, archives: list[Archive]
) -> TensorSource:
    shape, dtype = as_shape(metadata["size"]), metadata["properties"].state[0]
    if dtype not in ITEM_BYTES:
        raise FullshardError(f"{path}: {name} has an unknown dtype")
    boxes = [(as_shape(_state(c)["offsets"]), as_shape(_state(c)["sizes"])) for c in metadata["chunks"]]
    _refuse_bad_boxes(path, name, shape, boxes)
    chunks = [(at, _chunk(path, name, dtype, sizes, locations.get((name, at)), archives)) for at, sizes in boxes]
    return TensorSource(name, dtype, shape, partial(_assemble, shape, dtype, chunks))


def _refuse_bad_boxes(path: Path, name: str, shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], ...]]) -> None:
    """Raise unless the boxes (offsets, sizes) cover the tensor exactly."""
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            raise FullshardError(f"{path}: a chunk of {name} has another number of dims")
        if any(a + n > whole for a, n, whole in zip(offsets, sizes, shape, strict=True)):
            raise FullshardError(f"{path}: a chunk of {name} is outside it")
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        raise FullshardError(f"{path}: the chunks of {name} do not add up to it")
    if boxes_overlap([(offsets, sizes) for offsets, sizes in boxes if 0 not in sizes]):
        raise FullshardError(f"{path}: chunks of {name} overlap")


def _chunk(path: Path, name: str, dtype: str, sizes: tuple[int, ...], location: Any, archives: list[Archive]) -> FileTensor:
    """A chunk that is still in its file. Its archive is appended to `archives`. Raises if shape or dtype are not those of
    the metadata."""
    if location is None:
        raise FullshardError(f"{path}: its metadata does not say where a chunk of {name} is; fetch it again")
    state = _state(location)
    if state.get("transform_descriptors"):
        raise FullshardError(f"{path} is compressed; save it again without extensions")
    if not (is_count(state["offset"]) and is_count(state["length"])):
        raise TypeError("not a range of a file")
    archive = Archive(file_inside(path, state["relative_path"]), state["offset"], state["length"])
    chunk = archive.load()
    if not isinstance(chunk, FileTensor) or chunk.shape != sizes or chunk.dtype != dtype:
        raise FullshardError(f"{path}: a chunk of {name} has another shape or dtype than in the metadata")
    archives.append(archive)
    return chunk


def _assemble(shape: tuple[int, ...], dtype: str, chunks: Sequence[PlacedChunk]) -> bytes | bytearray:
    """The bytes of a whole tensor."""
    if len(chunks) == 1 and chunks[0][1].shape == shape:
        return chunks[0][1].read()
    whole = np.zeros(shape, dtype=f"V{ITEM_BYTES[dtype]}")
    for offsets, chunk in chunks:
        box = tuple(slice(a, a + n) for a, n in zip(offsets, chunk.shape, strict=True))
        whole[box] = np.frombuffer(chunk.read(), dtype=whole.dtype).reshape(chunk.shape)
    return whole.tobytes()
