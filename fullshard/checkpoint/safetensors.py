"""Reads safetensors files by byte range, and writes their headers.

A file is eight bytes of header length, a JSON header and the tensors' bytes. The safetensors library reads whole tensors or
maps whole files; this module reads a part of a tensor into memory that the caller owns.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.reading import parse_json
from fullshard.base.untrusted_files import is_name, open_plain, quoted, read_into, read_small, refusing_os_errors

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
LARGEST_HEADER = 100_000_000  # bytes: the format's own limit
MOST_DIMS = 32

Box = Sequence[tuple[int, int]]  # start and stop in each dim


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file. Its bytes begin at offset `start`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


def is_count(value: Any) -> bool:
    """Whether a value read from a file is an integer that can count bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) <= MOST_DIMS and all(map(is_count, value))


class SafetensorsDirectory:
    """The tensors of all safetensors files in a directory, by name. `bytes_read` counts the bytes of tensors read so far."""

    def __init__(self, directory: Path):
        self.directory = directory
        with refusing_os_errors(f"read {directory}"):
            paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise FullshardError(f"{directory} has no .safetensors files; save the model with save_pretrained first")
        weight_map = _read_index(directory, {p.name for p in paths})
        by_name: dict[str, list[TensorEntry]] = {}
        for path in paths:
            for name, entry in read_header(path).items():
                by_name.setdefault(name, []).append(entry)
        self.entries = {name: _pick_entry(name, entries, weight_map) for name, entries in by_name.items()}
        self.bytes_read = 0

    def read(self, name: str, box: Box, into: memoryview) -> None:
        """Read the part of a tensor inside `box`, row-major, into `into`."""
        entry, done = self.entries[name], 0
        file = open_plain(entry.file)
        try:
            for offset, length in contiguous_ranges(entry.shape, box, entry.item_bytes):
                read_into(file, into[done : done + length], entry.start + offset, entry.file)
                done += length
        finally:
            os.close(file)
        self.bytes_read += done


def contiguous_ranges(shape: Sequence[int], box: Box, item_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) in bytes of the contiguous ranges that a box of a row-major tensor covers, in order."""
    if any(stop <= start for start, stop in box):
        return
    cut = max((d for d, (start, stop) in enumerate(box) if (start, stop) != (0, shape[d])), default=0)
    strides = [math.prod(shape[d + 1 :]) * item_bytes for d in range(len(shape))]
    start, stop = box[cut] if box else (0, 1)
    length = (stop - start) * (strides[cut] if shape else item_bytes)
    for outer in product(*(range(*box[d]) for d in range(cut))):
        base = sum(i * strides[d] for d, i in enumerate(outer))
        yield base + (start * strides[cut] if shape else 0), length


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file by name. Raises if its header is malformed or does not match the file's size."""
    file = open_plain(path)
    try:
        read = lambda offset, into: read_into(file, into, offset, path)
        return parse_header(str(path), os.fstat(file).st_size, read)
    finally:
        os.close(file)


def parse_header(path: str, size: int, read: Callable[[int, memoryview], None]) -> dict[str, TensorEntry]:
    """As `read_header`, for any storage: `read(offset, into)` fills memory from it."""
    first = bytearray(min(8, size))
    read(0, memoryview(first))
    length = int.from_bytes(first, "little")
    if size < 8 or length > min(size - 8, LARGEST_HEADER):
        raise FullshardError(f"{path} is not a safetensors file, or truncated: its header does not fit into its {size} bytes")
    text = bytearray(length)
    read(8, memoryview(text))
    header = _parse(path, text)
    if not isinstance(header, dict):
        raise FullshardError(f"{path} is damaged: its header is not a table; fetch it again")
    entries = {name: _entry(Path(path), name, value, 8 + length) for name, value in header.items() if name != "__metadata__"}
    _refuse_gaps(path, [(e.start, e.nbytes) for e in entries.values()], 8 + length, size)
    return entries


def _parse(path: str, text: bytearray) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(table := dict(pairs)) < len(pairs):
            raise FullshardError(f"{path} is damaged: its header has a key twice; fetch it again")
        return table

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError):  # bad syntax or UTF-8, or an integer with too many digits for Python
        raise FullshardError(f"{path} is damaged: its header is not JSON; fetch it again") from None


def _refuse_gaps(path: str, extents: Iterable[tuple[int, int]], at: int, size: int) -> None:
    """Raise unless the tensors cover the file from `at` on without gaps and overlaps, as the format demands."""
    for start, nbytes in sorted(extents):
        if start != at:
            raise FullshardError(f"{path} is damaged: its tensors overlap, or have gaps between them; fetch it again")
        at += nbytes
    if at != size:
        raise FullshardError(f"{path} is damaged or truncated: its header describes {at} bytes, not {size}; fetch it again")


def make_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: dict[str, str] | None = None, align: int = 8
) -> tuple[bytes, list[int]]:
    """The header of a file with these tensors (name, dtype, shape), padded to a multiple of `align` bytes, and the offset of
    each tensor in the file. Give tensors of wide dtypes first: then all are aligned, without gaps."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at, starts = 0, []
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        if name in header or name == "__metadata__":
            raise FullshardError(f"two tensors of one file would be called {quoted(name)}; rename one of them")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        starts.append(at)
        at += nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in starts]


def _entry(path: Path, name: str, value: Any, base: int) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
        known = is_name(name) and dtype in ITEM_BYTES and is_shape(shape) and is_shape((start, stop))
        valid = known and math.prod(shape) * ITEM_BYTES[dtype] == stop - start
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise FullshardError(f"{path} is damaged: its header has a malformed entry {quoted(name)}; fetch it again")
    return TensorEntry(path, dtype, tuple(shape), base + start)


def _read_index(directory: Path, files: set[str]) -> dict[str, str]:
    """The `weight_map` of a directory's index: tensor to file. Empty without an index; raises if a file is missing."""
    index = directory / "model.safetensors.index.json"
    if not os.path.lexists(index):
        return {}
    tree = parse_json(read_small(index, LARGEST_HEADER), str(index))
    table = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise FullshardError(f"{index} is damaged: it has no weight_map that names files; fetch it again")
    wanted = set(table.values())
    if missing := sorted(wanted - files):
        raise FullshardError(f"{directory} lacks {quoted(missing[0])[1:-1]} (of {len(wanted)} files); fetch it again")
    return table


def _pick_entry(name: str, entries: Sequence[TensorEntry], weight_map: dict[str, str]) -> TensorEntry:
    """The entry of a tensor. If several files hold it, the index must say which one counts."""
    named = [e for e in entries if e.file.name == weight_map.get(name)]
    if len(entries) > 1 and not named:
        first, second = entries[0].file, entries[1].file.name
        raise FullshardError(f"{first} and {second} both hold {quoted(name)[1:-1]}; remove the file that is not the model's")
    return named[0] if named else entries[0]
