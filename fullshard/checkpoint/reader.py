"""Reads a checkpoint's tensors, whole or in part, into memory that the caller owns."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.text import first_of
from fullshard.checkpoint.commit import find, read_manifest
from fullshard.checkpoint.directories import Place, ReadPiece
from fullshard.checkpoint.manifest import Chunk, Manifest, TensorRecord
from fullshard.checkpoint.safetensors import Box, contiguous_ranges

NUMPY_DTYPE = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip

ExpectedTensors = Mapping[str, tuple[Sequence[int], str]]  # name: shape, dtype


class Checkpoint:
    """A committed checkpoint. The constructor reads the manifest only."""

    def __init__(self, place: Place, manifest: Manifest | None = None):
        self.place, self.manifest = place, manifest or read_manifest(place)

    def read(self, name: str, box: Box, into: memoryview) -> None:
        """Read the part of a tensor inside `box`, row-major, into `into`, which has exactly its size."""
        record = self.manifest.tensors[name]
        item = record.item_bytes
        shape = [stop - start for start, stop in box]
        target = np.frombuffer(into, dtype=f"V{item}").reshape(shape)
        for chunk in record.chunks:
            shared = intersection(chunk.box, box)
            if shared is None:
                continue
            if list(shared) == list(box):
                self.read_chunk(chunk, shared, item, into)
                return
            part = np.empty([b - a for a, b in shared], dtype=f"V{item}")
            self.read_chunk(chunk, shared, item, part.reshape(-1).view(np.uint8).data)
            target[tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(shared, box, strict=True))] = part

    def read_chunk(self, chunk: Chunk, box: Box, item_bytes: int, into: memoryview) -> None:
        """Read the part of a chunk inside `box`, which is given in the tensor's coordinates."""
        inside = [(a - s, b - s) for (a, b), s in zip(box, chunk.start, strict=True)]
        pieces, done = [], 0
        for offset, length in contiguous_ranges(chunk.shape, inside, item_bytes):
            pieces.append((chunk.offset + offset, into[done : done + length]))
            done += length
        self.read_pieces(chunk.file, pieces)

    def read_pieces(self, file: str, pieces: Sequence[ReadPiece]) -> None:
        """Fill memory from places of a file."""
        try:
            self.place.read(file, pieces)
        except FileNotFoundError:
            raise FullshardError(self._lacks(file)) from None
        except EOFError:
            raise FullshardError(f"{self.place}/{file} is truncated; use another checkpoint") from None

    def refuse_wrong_sizes(self, needed: Iterable[str] = ()) -> None:
        """Raise if a file does not have the size in the manifest, or a `needed` one is missing. Called before memory is
        allocated for the sizes that the manifest claims."""
        for file in needed:
            if file not in self._sizes:
                raise FullshardError(self._lacks(file))
        for file, record in self.manifest.files.items():
            if (size := self._sizes.get(file, record.nbytes)) != record.nbytes:
                raise FullshardError(f"{self.place}/{file} has {size} bytes instead of {record.nbytes}; use another checkpoint")

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return self.place.files()

    def _lacks(self, file: str) -> str:
        """What a missing file means, and what to do."""
        node = self.manifest.files[file].node
        if node is None:
            return f"{self.place} lacks {file}; use another checkpoint"
        return (
            f"{self.place} lacks {file}, which node {node} keeps on a disk of its own; "
            "copy the files of all nodes into one directory, or resume with the same plan on the same nodes"
        )

    def tensor(self, name: str) -> NDArray[np.generic]:
        """A whole tensor as a numpy array; bf16 is converted to fp32."""
        record = self.manifest.tensors[name]
        return as_numpy(self.raw(name), record)

    def raw(self, name: str) -> bytearray:
        """The bytes of a whole tensor."""
        record = self.manifest.tensors[name]
        self.refuse_wrong_sizes({chunk.file for chunk in record.chunks})
        data = bytearray(record.nbytes)
        if data:
            self.read(name, [(0, n) for n in record.shape], memoryview(data))
        return data


def open_checkpoint(where: str | Path) -> Checkpoint:
    """Open the checkpoint at `where` (see `find`), and check the sizes of its files."""
    checkpoint = Checkpoint(find(where))
    checkpoint.refuse_wrong_sizes()
    return checkpoint


def intersection(a: Box, b: Box) -> Box | None:
    """The box that two boxes share, or None. Boxes without dims hold a single element."""
    shared = [(max(x0, y0), min(x1, y1)) for (x0, x1), (y0, y1) in zip(a, b, strict=True)]
    return None if any(stop <= start for start, stop in shared) else shared


def as_numpy(data: bytearray | memoryview | bytes, record: TensorRecord) -> NDArray[np.generic]:
    if record.dtype in NUMPY_DTYPE:
        return np.frombuffer(data, dtype=NUMPY_DTYPE[record.dtype]).reshape(record.shape)
    if record.dtype == "BF16":
        wide = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(record.shape)
    raise FullshardError(f"{record.dtype} tensors cannot be computed with; convert them first")


# -- names, shapes and dtypes -------------------------------------------------------------------------------


def refuse_mismatch(
    where: str, records: Mapping[str, TensorRecord], expected: ExpectedTensors, allow_missing: Sequence[str] = ()
) -> None:
    """Raise if the tensors of a checkpoint are not the expected ones, and list the differences. `allow_missing`: patterns
    of names that need not be there."""
    missing = [n for n in expected if n not in records and not any(fnmatchcase(n, p) for p in allow_missing)]
    extra = [n for n in records if n not in expected]
    types = {n: (type_text(records[n].shape, records[n].dtype), type_text(*expected[n])) for n in expected if n in records}
    changed = [f"{n} ({has} instead of {wanted})" for n, (has, wanted) in types.items() if has != wanted]
    parts = [f"it lacks {first_of(missing, 5)}"] if missing else []
    parts += [f"it has {first_of(extra, 5)} besides"] if extra else []
    parts += [f"it has {first_of(changed, 5)}"] if changed else []
    if parts:
        hint = nearest(missing[0], extra) if missing and extra else ""
        raise FullshardError(f"{where} is of another model or optimizer: {'; '.join(parts)}{hint}")
    for pattern in allow_missing:
        if not any(fnmatchcase(n, pattern) for n in expected):
            raise FullshardError(f"allow_missing = {pattern!r} matches no tensor of the state; leave it out")


def refuse_bad_numbers(saved: Mapping[str, Any]) -> None:
    """Raise unless `saved`, read from a manifest, has the types that engines write."""
    slots, scale = saved.get("slots", {}), saved.get("loss_scale")
    plain = isinstance(slots, dict) and all(
        isinstance(s, dict) and all(map(_is_plain_number, s.values())) for s in slots.values()
    )
    names = saved.get("without_slots", [])
    named = names == "all" or (isinstance(names, list) and all(isinstance(n, str) for n in names))
    scaled = scale is None or (isinstance(scale, dict) and all(isinstance(scale.get(k), int | float) for k in ("value", "quiet")))
    if not (plain and named and scaled):
        raise FullshardError("the `state` of its manifest is malformed; use another checkpoint")


def _is_plain_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)  # torch's SGD keeps a None


def type_text(shape: Sequence[int], dtype: str) -> str:
    """`F32 [2, 3]`."""
    return f"{dtype} {list(shape)}"


def count_elements(records: Iterable[TensorRecord]) -> int:
    return sum(math.prod(r.shape) for r in records)
