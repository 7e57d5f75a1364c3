"""The manifest: what a checkpoint holds, and where each byte of it lies. One JSON file, written last.

Its first line is the checksum of all that follows, so that no byte of it can change unnoticed. Reading one
checks everything it says before anything is allocated or opened on its word: names, sizes, positions.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import xxhash

from fullshard.checkpoint.safetensors import ITEM_BYTES, Box
from fullshard.errors import FullshardError

MANIFEST = "manifest.json"
FORMAT = "fullshard-checkpoint"
VERSION = 1
LARGEST = 1 << 30  # bytes of a manifest: a thousand ranks with ten thousand tensors need a third of it
_FIRST_LINE = re.compile(rb'\{"checksum": "([0-9a-f]{32})",\n')
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
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError):
            raise ManifestError(f"{where} is damaged: it is not JSON; use another checkpoint") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise ManifestError(f"{where} is not the manifest of a checkpoint")
        version = tree.get("version")
        if not isinstance(version, int) or not 1 <= version <= VERSION:
            raise ManifestError(f"{where} is of version {version!r}, this fullshard reads up to {VERSION}; use a newer one")
        try:
            return cls(**_fields(tree))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ManifestError(f"{where} makes no sense: {error}; use another checkpoint") from None


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
    _need(_is_count(tree["step"]), "its step is no count")
    _need(tree["cursor"] is None or _is_count(tree["cursor"]), "its cursor is no count")
    for key in ("state", "metrics"):
        _need(isinstance(tree[key], dict), f"its {key} is no table")
    _need(isinstance(tree["state"].get("extra", {}), dict), "its extra is no table")
    for key in ("plan", "recipe"):
        _need(tree[key] is None or isinstance(tree[key], dict), f"its {key} is no table")
    kept = {k: tree[k] for k in ("step", "cursor", "plan", "recipe", "state", "metrics")}
    return kept | {"created": float(tree["created"]), "files": files, "tensors": tensors}


def _file(name: str, value: Any) -> FileRecord:
    # A plain name: no separator, no leading dot, so that no path leaves the checkpoint.
    _need(bool(_FILE_NAME.fullmatch(name)) and name != MANIFEST, f"{name!r} is no name for a file of a checkpoint")
    _need(_is_count(value["bytes"]), f"{name} has no size")
    _need(isinstance(value["xxh3_128"], str), f"{name} has no checksum")
    _need(value.get("node") is None or _is_count(value["node"]), f"{name} has no node")
    return FileRecord(value["bytes"], value["xxh3_128"], value.get("node"))


def _tensor(name: str, value: Any, files: Mapping[str, FileRecord]) -> TensorRecord:
    shape, dtype = _counts(value["shape"], name), value["dtype"]
    _need(dtype in ITEM_BYTES, f"{name} is of the unknown dtype {dtype!r}")
    chunks = tuple(Chunk(c["file"], c["offset"], _counts(c["start"], name), _counts(c["shape"], name)) for c in value["chunks"])
    for chunk in chunks:
        _need(chunk.file in files, f"{name} lies in {chunk.file!r}, which is not listed")
        size = math.prod(chunk.shape) * ITEM_BYTES[dtype]
        fits = _is_count(chunk.offset) and chunk.offset + size <= files[chunk.file].nbytes
        _need(fits, f"a chunk of {name} lies outside {chunk.file}")
        _need(len(chunk.start) == len(chunk.shape) == len(shape), f"a chunk of {name} has another number of dims")
        inside = all(a + n <= whole for a, n, whole in zip(chunk.start, chunk.shape, shape, strict=True))
        _need(inside, f"a chunk of {name} lies outside the tensor")
    _need(sum(math.prod(c.shape) for c in chunks) == math.prod(shape), f"the chunks of {name} do not add up to it")
    _need(not _overlap(chunks), f"chunks of {name} overlap")
    return TensorRecord(shape, dtype, chunks)


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Whether two boxes share an element; chunk by chunk against those that begin later in the first dim."""
    if len(chunks) < 2:
        return False
    starts = np.array([c.start for c in chunks], dtype=np.int64)
    stops = starts + np.array([c.shape for c in chunks], dtype=np.int64)
    order = np.argsort(starts[:, 0], kind="stable")
    starts, stops = starts[order], stops[order]
    for i in range(len(chunks) - 1):
        near = slice(i + 1, int(np.searchsorted(starts[:, 0], stops[i, 0], side="left")))
        if np.any(np.all((starts[near] < stops[i]) & (stops[near] > starts[i]), axis=1)):
            return True
    return False


def _counts(values: Any, name: str) -> tuple[int, ...]:
    _need(isinstance(values, list) and len(values) <= 32 and all(map(_is_count, values)), f"{name} has an odd shape")
    return tuple(values)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
