"""Reading a checkpoint's tensors, whole or in part, into memory that the caller owns."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fullshard.checkpoint.commit import find, read_manifest
from fullshard.checkpoint.manifest import Chunk, Manifest, TensorRecord
from fullshard.checkpoint.place import Place
from fullshard.checkpoint.safetensors import Box, runs
from fullshard.errors import FullshardError, nearest

NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip

Wanted = Mapping[str, tuple[Sequence[int], str]]  # name: shape, dtype


class Checkpoint:
    """A committed checkpoint. Opening it reads the manifest only."""

    def __init__(self, place: Place, manifest: Manifest | None = None):
        self.place, self.manifest = place, manifest or read_manifest(place)

    def read(self, name: str, box: Box, into: memoryview) -> None:
        """The part of a tensor that `box` cuts out, row-major, into `into`; `into` is its very size."""
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
        """The part of one chunk that `box`, in the tensor's own coordinates, cuts out of it."""
        inside = [(a - s, b - s) for (a, b), s in zip(box, chunk.start, strict=True)]
        pieces, done = [], 0
        for offset, length in runs(chunk.shape, inside, item_bytes):
            pieces.append((chunk.offset + offset, into[done : done + length]))
            done += length
        try:
            self.place.read(chunk.file, pieces)
        except FileNotFoundError:
            raise FullshardError(self._lacks(chunk.file)) from None
        except EOFError:
            raise FullshardError(f"{self.place}/{chunk.file} is cut off; use another checkpoint") from None

    def refuse_other_sizes(self, needed: Iterable[str] = ()) -> None:
        """Before memory is taken on the manifest's word: the files that are here have the sizes that it says, and those
        that are needed are here."""
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
        node = self.manifest.files[file].node
        if node is None:
            return f"{self.place} lacks {file}; use another checkpoint"
        return (
            f"{self.place} lacks {file}, which node {node} keeps on a disk of its own; "
            "copy the files of all nodes into one directory, or resume with the same plan on the same nodes"
        )

    def tensor(self, name: str) -> NDArray[np.generic]:
        """A whole tensor, as numpy; bf16 and fp8, which numpy lacks, widened to fp32."""
        record = self.manifest.tensors[name]
        return as_numpy(self.raw(name), record)

    def raw(self, name: str) -> bytearray:
        """The bytes of a whole tensor."""
        record = self.manifest.tensors[name]
        self.refuse_other_sizes({chunk.file for chunk in record.chunks})
        data = bytearray(record.nbytes)
        if data:
            self.read(name, [(0, n) for n in record.shape], memoryview(data))
        return data


def open_checkpoint(where: str | Path) -> Checkpoint:
    """The checkpoint that a person means; see `find`. Those of its files that are here have the sizes that it says."""
    found = Checkpoint(find(where))
    found.refuse_other_sizes()
    return found


def intersection(a: Box, b: Box) -> Box | None:
    """The box that two boxes share, if they share one. Boxes without dims are a single element."""
    shared = [(max(x0, y0), min(x1, y1)) for (x0, x1), (y0, y1) in zip(a, b, strict=True)]
    return None if any(stop <= start for start, stop in shared) else shared


def as_numpy(data: bytearray | memoryview | bytes, record: TensorRecord) -> NDArray[np.generic]:
    if record.dtype in NUMPY:
        return np.frombuffer(data, dtype=NUMPY[record.dtype]).reshape(record.shape)
    if record.dtype == "BF16":
        wide = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(record.shape)
    raise FullshardError(f"{record.dtype} tensors cannot be computed with; convert them first")


# -- strict keys --------------------------------------------------------------------------------------------


def refuse_others(where: str, found: Mapping[str, TensorRecord], wanted: Wanted, allow_missing: Sequence[str] = ()) -> None:
    """Raise where a checkpoint and what is to be filled from it differ, listing how."""
    missing = [n for n in wanted if n not in found and not any(fnmatchcase(n, p) for p in allow_missing)]
    extra = [n for n in found if n not in wanted]
    changed = [f"{n} ({_kind(*_of(found[n]))} instead of {_kind(*wanted[n])})" for n in wanted if n in found]
    changed = [text for text, n in zip(changed, [n for n in wanted if n in found], strict=True) if _differs(found[n], wanted[n])]
    parts = [f"it lacks {_listed(missing)}"] if missing else []
    parts += [f"it has {_listed(extra)} besides"] if extra else []
    parts += [f"it has {_listed(changed)}"] if changed else []
    if parts:
        hint = nearest(missing[0], extra) if missing and extra else ""
        raise FullshardError(f"{where} is of another model or optimizer: {'; '.join(parts)}{hint}")
    for pattern in allow_missing:
        if not any(fnmatchcase(n, pattern) for n in wanted):
            raise FullshardError(f"allow_missing = {pattern!r} matches nothing that is to be loaded; leave it out")


def _of(record: TensorRecord) -> tuple[Sequence[int], str]:
    return record.shape, record.dtype


def _differs(record: TensorRecord, wanted: tuple[Sequence[int], str]) -> bool:
    return tuple(record.shape) != tuple(wanted[0]) or record.dtype != wanted[1]


def _kind(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype} {list(shape)}"


def _listed(names: Iterable[str]) -> str:
    all_of_them = list(names)
    shown = ", ".join(all_of_them[:5])
    return f"{shown} and {len(all_of_them) - 5} more" if len(all_of_them) > 5 else shown


def count_elements(records: Iterable[TensorRecord]) -> int:
    return sum(math.prod(r.shape) for r in records)
