"""The manifest of a checkpoint: one JSON file that lists tensors, files and checksums. It is written last.

Its first line holds the checksum of everything after it. Names, sizes and offsets are validated when a manifest is read,
before any memory is allocated or file opened because of them.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import xxhash

from fullshard.base.errors import FullshardError
from fullshard.base.reading import parse_json
from fullshard.base.untrusted_files import is_name, quoted
from fullshard.checkpoint.safetensors import ITEM_BYTES, Box, is_count, is_shape

MANIFEST = "manifest.json"
FORMAT = "fullshard-checkpoint"
VERSION = 1
LARGEST = 1 << 30  # bytes of a manifest: a thousand ranks with ten thousand tensors need a third of it
LATEST = 253_402_300_800  # seconds since 1970: the year 10000, which `datetime` cannot represent
MOST_COMPARED = 10**9  # comparisons in the search for overlapping chunks
_FIRST_LINE = re.compile(rb'\{"checksum": "([0-9a-f]{32})",\n')
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


class ManifestError(FullshardError):
    """A manifest that is damaged, or whose contents contradict each other."""


def checksum(data: bytes | memoryview) -> str:
    """XXH3, 128 bits: faster than any disk. It detects accidental damage, not forgery."""
    digest = xxhash.xxh3_128()
    digest.update(data)  # releases the GIL in every version of xxhash; the one-call functions do not
    return digest.hexdigest()


def shard_name(index: int, count: int) -> str:
    """The name of one of a checkpoint's safetensors files."""
    return f"shard-{index:05d}-of-{count:05d}.safetensors"


def chunk_name(name: str, whole: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> str:
    """The name of a chunk in its file: the tensor's, followed by the chunk's offsets if it is not the whole tensor."""
    return name if tuple(shape) == tuple(whole) else f"{name}@{','.join(map(str, start))}"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, stored in consecutive bytes of a file."""

    file: str
    offset: int  # bytes from the start of the file
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return [(a, a + n) for a, n in zip(self.start, self.shape, strict=True)]


@dataclass(frozen=True)
class TensorRecord:
    """A tensor and its chunks. `shape` is that of the whole tensor, `dtype` a safetensors dtype such as `BF16`."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class FileRecord:
    """A file's size and checksum. `node`: the node whose disk holds it, if the nodes share none."""

    nbytes: int
    checksum: str
    node: int | None = None


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. `cursor`: samples taken from the data; `state`: everything small that is not a tensor;
    `metrics`: numbers that retention can rank by; `created`: seconds since 1970."""

    step: int
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]
    cursor: int | None = None
    plan: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    state: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    created: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.files.values())

    def to_bytes(self, known: Mapping[str, str] = MappingProxyType({})) -> bytes:
        """JSON with one line for each tensor and file, which is readable and works with diff. `known`: text of fields that
        the caller has already encoded."""
        small = {"format": FORMAT, "version": VERSION, "step": self.step, "cursor": self.cursor, "created": self.created}
        parts = [field_text(k, v) for k, v in small.items()]
        parts += [known.get(k) or field_text(k, getattr(self, k)) for k in ("metrics", "state", "plan", "recipe")]
        parts += [_lines("files", {n: _file_dict(f) for n, f in self.files.items()})]
        parts += [known.get("tensors") or tensors_text(self.tensors)]
        body = (",\n".join(parts) + "}\n").encode()
        return f'{{"checksum": "{checksum(body)}",\n'.encode() + body

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Parse and validate a manifest. Raises a ManifestError that names `where`."""
        first = _FIRST_LINE.match(data)
        if not first or first[1].decode() != checksum(memoryview(data)[first.end() :]):
            raise ManifestError(f"{where} is damaged: its checksum does not match; use another checkpoint")
        if _SURROGATE.search(data):  # `to_bytes` never writes \ud800 and the like, which cannot be encoded as UTF-8
            raise ManifestError(f"{where} is damaged: it holds half of a surrogate pair; use another checkpoint")
        try:
            tree = parse_json(data, "it")
        except FullshardError as error:
            raise ManifestError(f"{where} is damaged: {error}; use another checkpoint") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise ManifestError(f"{where} is not a checkpoint's manifest")
        version: Any = tree.get("version")
        if not is_count(version) or not 1 <= version <= VERSION:
            shown = version if is_count(version) else quoted(version)
            raise ManifestError(f"{where} has version {shown}; this fullshard reads up to {VERSION}: install a newer one")
        try:
            return cls(**_fields(tree))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = error if type(error) is ValueError else "a field is missing, or has the wrong type"
            raise ManifestError(f"{where} is malformed: {reason}; use another checkpoint") from None


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def field_text(key: str, value: Any) -> str:
    return f"{_json(key)}: {_json(value)}"


def _lines(key: str, table: Mapping[str, Any]) -> str:
    return f"{_json(key)}: {{\n" + ",\n".join(f" {_json(k)}: {_json(v)}" for k, v in table.items()) + "}"


def tensors_text(tensors: Mapping[str, TensorRecord]) -> str:
    """The manifest's field `tensors`: its longest part, and the same at every save of a run."""
    return _lines("tensors", {n: _tensor_dict(t) for n, t in tensors.items()})


def _file_dict(f: FileRecord) -> dict[str, Any]:
    return {"bytes": f.nbytes, "xxh3_128": f.checksum} | ({} if f.node is None else {"node": f.node})


def _tensor_dict(t: TensorRecord) -> dict[str, Any]:
    chunks = [{"file": c.file, "offset": c.offset, "start": c.start, "shape": c.shape} for c in t.chunks]
    return {"shape": t.shape, "dtype": t.dtype, "chunks": chunks}


# -- validation ---------------------------------------------------------------------------------------------


def _fields(tree: dict[str, Any]) -> dict[str, Any]:
    files = {name: _file(name, value) for name, value in tree["files"].items()}
    tensors = {name: _tensor(name, value, files) for name, value in tree["tensors"].items()}
    _need(is_count(tree["step"]), "its step is not a count")
    _need(tree["cursor"] is None or is_count(tree["cursor"]), "its cursor is not a count")
    _need(_is_number(tree["created"]) and 0 <= tree["created"] < LATEST, "its date is not valid")
    for key in ("state", "metrics"):
        _need(isinstance(tree[key], dict), f"its {key} is not a table")
    _need(all(is_name(k) and _is_number(v) for k, v in tree["metrics"].items()), "its metrics are not numbers")
    _need(isinstance(tree["state"].get("extra", {}), dict), "its extra is not a table")
    for key in ("plan", "recipe"):
        _need(tree[key] is None or isinstance(tree[key], dict), f"its {key} is not a table")
    for key in ("state", "plan", "recipe"):
        field_text(key, tree[key]).encode()  # raises for NaN and surrogates, which could not be written again
    _need(not _bytes_overlap(tensors), "two chunks share bytes of a file")
    kept = {k: tree[k] for k in ("step", "cursor", "plan", "recipe", "state", "metrics")}
    return kept | {"created": float(tree["created"]), "files": files, "tensors": tensors}


def _file(name: str, value: Any) -> FileRecord:
    # No separator and no leading dot: no path leaves the checkpoint.
    plain = bool(_FILE_NAME.fullmatch(name)) and name != MANIFEST
    _need(plain, f"{quoted(name)} is not a valid name for a file of a checkpoint")
    _need(is_count(value["bytes"]), f"{name} has no size")
    digest = value["xxh3_128"]
    _need(isinstance(digest, str) and bool(_DIGEST.fullmatch(digest)), f"{name} has no checksum")
    _need(value.get("node") is None or is_count(value["node"]), f"{name} has no node")
    return FileRecord(value["bytes"], digest, value.get("node"))


def _tensor(name: str, value: Any, files: Mapping[str, FileRecord]) -> TensorRecord:
    _need(is_name(name), f"{quoted(name)} is not a valid name for a tensor")
    shape, dtype = _shape(value["shape"], name), value["dtype"]
    _need(dtype in ITEM_BYTES, f"{name} has the unknown dtype {quoted(dtype)}")
    chunks = tuple(Chunk(c["file"], c["offset"], _shape(c["start"], name), _shape(c["shape"], name)) for c in value["chunks"])
    for chunk in chunks:
        _need(chunk.file in files, f"{name} is in {quoted(chunk.file)}, which is not listed")
        size = math.prod(chunk.shape) * ITEM_BYTES[dtype]
        fits = is_count(chunk.offset) and chunk.offset + size <= files[chunk.file].nbytes
        _need(fits, f"a chunk of {name} is outside {chunk.file}")
        _need(len(chunk.start) == len(chunk.shape) == len(shape), f"a chunk of {name} has another number of dims")
        inside = all(a + n <= whole for a, n, whole in zip(chunk.start, chunk.shape, shape, strict=True))
        _need(inside, f"a chunk of {name} is outside the tensor")
    _need(sum(math.prod(c.shape) for c in chunks) == math.prod(shape), f"the chunks of {name} do not add up to it")
    _need(not boxes_overlap([(c.start, c.shape) for c in chunks]), f"chunks of {name} overlap")
    return TensorRecord(shape, dtype, chunks)


def boxes_overlap(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether two boxes (start, shape) share an element. Boxes are sorted along the dim that is cut most, and each is
    compared only with those that begin before it ends."""
    if len(boxes) < 2:
        return False
    starts = np.array([start for start, _ in boxes], dtype=np.int64)
    stops = starts + np.array([shape for _, shape in boxes], dtype=np.int64)
    dim = max(range(starts.shape[1]), key=lambda d: len(np.unique(starts[:, d])))
    order = np.argsort(starts[:, dim], kind="stable")
    starts, stops = starts[order], stops[order]
    ends = np.searchsorted(starts[:, dim], stops[:, dim], side="left")
    compared = int(np.maximum(ends - np.arange(len(boxes)), 0).sum()) * starts.shape[1]
    _need(compared <= MOST_COMPARED, "a tensor is cut into too many chunks")
    for i, end in enumerate(ends[:-1]):
        near = slice(i + 1, int(end))
        if np.any(np.all((starts[near] < stops[i]) & (stops[near] > starts[i]), axis=1)):
            return True
    return False


def _bytes_overlap(tensors: Mapping[str, TensorRecord]) -> bool:
    """Whether a byte of a file belongs to two chunks. A small file could otherwise claim large tensors."""
    extents: dict[str, list[tuple[int, int]]] = {}
    for t in tensors.values():
        for c in t.chunks:
            extents.setdefault(c.file, []).append((c.offset, c.offset + math.prod(c.shape) * t.item_bytes))
    ordered = [sorted(e for e in pairs if e[0] < e[1]) for pairs in extents.values()]
    return any(a[1] > b[0] for pairs in ordered for a, b in pairwise(pairs))


def _shape(values: Any, name: str) -> tuple[int, ...]:
    _need(isinstance(values, list) and is_shape(values), f"{name} has an invalid shape")
    return tuple(values)


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number short enough to print."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
