"""The manifest: what a checkpoint holds, and where each byte of it lies. One JSON file, written last.

Its first line is the checksum of all that follows, so that no byte of it can change unnoticed. Reading one
checks everything it says before anything is allocated or opened on its word: names, sizes, positions.
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

from fullshard.checkpoint.safetensors import ITEM_BYTES, Box, is_count, is_shape
from fullshard.checkpoint.untrusted_files import is_name, quoted
from fullshard.errors import FullshardError
from fullshard.reading import parse_json

MANIFEST = "manifest.json"
FORMAT = "fullshard-checkpoint"
VERSION = 1
LARGEST = 1 << 30  # bytes of a manifest: a thousand ranks with ten thousand tensors need a third of it
LATEST = 253_402_300_800  # seconds since 1970: the year 10000, which no calendar here knows
MOST_COMPARED = 10**9  # numbers that are compared to find chunks that overlap
_FIRST_LINE = re.compile(rb'\{"checksum": "([0-9a-f]{32})",\n')
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


class ManifestError(FullshardError):
    """A manifest that is damaged, or that says what cannot be."""


def checksum(data: bytes | memoryview) -> str:
    """XXH3, 128 bits: faster than any disk. It finds accidents; it is no seal against a forger."""
    digest = xxhash.xxh3_128()
    digest.update(data)  # which every version does without the interpreter; digests in one call hold it in some
    return digest.hexdigest()


def chunk_name(name: str, whole: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> str:
    """What a reader of the file sees: the tensor's name, and where it is cut, the offsets of this part."""
    return name if tuple(shape) == tuple(whole) else f"{name}@{','.join(map(str, start))}"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, lying in one stretch of a file."""

    file: str
    offset: int  # bytes from the start of the file
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return [(a, a + n) for a, n in zip(self.start, self.shape, strict=True)]


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as if it were whole. `dtype` is safetensors' word for it."""

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
    """A file's size and checksum. `node`: the machine on whose own disk it lies, where there is no shared one."""

    nbytes: int
    checksum: str
    node: int | None = None


@dataclass(frozen=True)
class Manifest:
    """A checkpoint, described. `cursor`: samples taken of the data; `state`: what is small; `metrics`: what
    retention may rank by; `created`: seconds since 1970."""

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
        """A line for each tensor and file, for people and for diff. `known`: the text of fields that was made before."""
        small = {"format": FORMAT, "version": VERSION, "step": self.step, "cursor": self.cursor, "created": self.created}
        parts = [field_text(k, v) for k, v in small.items()]
        parts += [known.get(k) or field_text(k, getattr(self, k)) for k in ("metrics", "state", "plan", "recipe")]
        parts += [_lines("files", {n: _file_dict(f) for n, f in self.files.items()})]
        parts += [known.get("tensors") or tensors_text(self.tensors)]
        body = (",\n".join(parts) + "}\n").encode()
        return f'{{"checksum": "{checksum(body)}",\n'.encode() + body

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Raises a ManifestError that names `where`."""
        first = _FIRST_LINE.match(data)
        if not first or first[1].decode() != checksum(memoryview(data)[first.end() :]):
            raise ManifestError(f"{where} is damaged: its checksum does not match; use another checkpoint")
        if _SURROGATE.search(data):  # half a character, which no text can hold; whole ones are written as they are
            raise ManifestError(f"{where} is damaged: it holds a surrogate instead of a character; use another checkpoint")
        try:
            tree = parse_json(data, "it")
        except FullshardError as error:
            raise ManifestError(f"{where} is damaged: {error}; use another checkpoint") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise ManifestError(f"{where} is not the manifest of a checkpoint")
        version: Any = tree.get("version")
        if not is_count(version) or not 1 <= version <= VERSION:
            said = version if is_count(version) else quoted(version)
            raise ManifestError(f"{where} is of version {said}, this fullshard reads up to {VERSION}; use a newer one")
        try:
            return cls(**_fields(tree))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            said = error if type(error) is ValueError else "a part of it is missing, or of another kind"
            raise ManifestError(f"{where} makes no sense: {said}; use another checkpoint") from None


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def field_text(key: str, value: Any) -> str:
    return f"{_json(key)}: {_json(value)}"


def _lines(key: str, table: Mapping[str, Any]) -> str:
    return f"{_json(key)}: {{\n" + ",\n".join(f" {_json(k)}: {_json(v)}" for k, v in table.items()) + "}"


def tensors_text(tensors: Mapping[str, TensorRecord]) -> str:
    """The manifest's longest part; it is the same at every save of a run."""
    return _lines("tensors", {n: _tensor_dict(t) for n, t in tensors.items()})


def _file_dict(f: FileRecord) -> dict[str, Any]:
    return {"bytes": f.nbytes, "xxh3_128": f.checksum} | ({} if f.node is None else {"node": f.node})


def _tensor_dict(t: TensorRecord) -> dict[str, Any]:
    chunks = [{"file": c.file, "offset": c.offset, "start": c.start, "shape": c.shape} for c in t.chunks]
    return {"shape": t.shape, "dtype": t.dtype, "chunks": chunks}


# -- reading: nothing is believed ---------------------------------------------------------------------------


def _fields(tree: dict[str, Any]) -> dict[str, Any]:
    files = {name: _file(name, value) for name, value in tree["files"].items()}
    tensors = {name: _tensor(name, value, files) for name, value in tree["tensors"].items()}
    _need(is_count(tree["step"]), "its step is no count")
    _need(tree["cursor"] is None or is_count(tree["cursor"]), "its cursor is no count")
    _need(_is_number(tree["created"]) and 0 <= tree["created"] < LATEST, "its date is none")
    for key in ("state", "metrics"):
        _need(isinstance(tree[key], dict), f"its {key} is no table")
    _need(all(is_name(k) and _is_number(v) for k, v in tree["metrics"].items()), "its metrics are no numbers")
    _need(isinstance(tree["state"].get("extra", {}), dict), "its extra is no table")
    for key in ("plan", "recipe"):
        _need(tree[key] is None or isinstance(tree[key], dict), f"its {key} is no table")
    for key in ("state", "plan", "recipe"):
        field_text(key, tree[key]).encode()  # what is read can be written again: no NaN, no half of a surrogate pair
    _need(not _bytes_overlap(tensors), "two chunks lie in the same bytes of a file")
    kept = {k: tree[k] for k in ("step", "cursor", "plan", "recipe", "state", "metrics")}
    return kept | {"created": float(tree["created"]), "files": files, "tensors": tensors}


def _file(name: str, value: Any) -> FileRecord:
    # A plain name: no separator, no leading dot, so that no path leaves the checkpoint.
    plain = bool(_FILE_NAME.fullmatch(name)) and name != MANIFEST
    _need(plain, f"{quoted(name)} is no name for a file of a checkpoint")
    _need(is_count(value["bytes"]), f"{name} has no size")
    digest = value["xxh3_128"]
    _need(isinstance(digest, str) and bool(_DIGEST.fullmatch(digest)), f"{name} has no checksum")
    _need(value.get("node") is None or is_count(value["node"]), f"{name} has no node")
    return FileRecord(value["bytes"], digest, value.get("node"))


def _tensor(name: str, value: Any, files: Mapping[str, FileRecord]) -> TensorRecord:
    _need(is_name(name), f"{quoted(name)} is no name for a tensor")
    shape, dtype = _shape(value["shape"], name), value["dtype"]
    _need(dtype in ITEM_BYTES, f"{name} is of the unknown dtype {quoted(dtype)}")
    chunks = tuple(Chunk(c["file"], c["offset"], _shape(c["start"], name), _shape(c["shape"], name)) for c in value["chunks"])
    for chunk in chunks:
        _need(chunk.file in files, f"{name} lies in {quoted(chunk.file)}, which is not listed")
        size = math.prod(chunk.shape) * ITEM_BYTES[dtype]
        fits = is_count(chunk.offset) and chunk.offset + size <= files[chunk.file].nbytes
        _need(fits, f"a chunk of {name} lies outside {chunk.file}")
        _need(len(chunk.start) == len(chunk.shape) == len(shape), f"a chunk of {name} has another number of dims")
        inside = all(a + n <= whole for a, n, whole in zip(chunk.start, chunk.shape, shape, strict=True))
        _need(inside, f"a chunk of {name} lies outside the tensor")
    _need(sum(math.prod(c.shape) for c in chunks) == math.prod(shape), f"the chunks of {name} do not add up to it")
    _need(not boxes_overlap([(c.start, c.shape) for c in chunks]), f"chunks of {name} overlap")
    return TensorRecord(shape, dtype, chunks)


def boxes_overlap(boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether two of (start, shape) share an element; each against those that begin later in the dim that is cut most."""
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
    """Whether a byte of a file belongs to two chunks, by which a small file could claim large tensors."""
    extents: dict[str, list[tuple[int, int]]] = {}
    for t in tensors.values():
        for c in t.chunks:
            extents.setdefault(c.file, []).append((c.offset, c.offset + math.prod(c.shape) * t.item_bytes))
    ordered = [sorted(e for e in found if e[0] < e[1]) for found in extents.values()]
    return any(a[1] > b[0] for found in ordered for a, b in pairwise(found))


def _shape(values: Any, name: str) -> tuple[int, ...]:
    _need(isinstance(values, list) and is_shape(values), f"{name} has an odd shape")
    return tuple(values)


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number that is printed in a line."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
