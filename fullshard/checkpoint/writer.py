"""Writes checkpoints and safetensors files without an engine, a tensor at a time. Imports, averages and exports use it."""

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fullshard.base.errors import FullshardError
from fullshard.base.untrusted_files import refusing_os_errors
from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Local, Place
from fullshard.checkpoint.file_writer import sync_directory
from fullshard.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord, shard_name
from fullshard.checkpoint.safetensors import ITEM_BYTES, make_header

FILE_BYTES = 5 * 10**9  # largest size of a file, as in Hugging Face's exports

BytesLike = bytes | bytearray | memoryview


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written. `read` returns its bytes; it is called once, when they are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], BytesLike]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def split_into_files(sources: Iterable[TensorSource], limit: int = FILE_BYTES) -> list[list[TensorSource]]:
    """Divide tensors into files of at most `limit` bytes, or of one tensor."""
    files: list[list[TensorSource]] = [[]]
    size = 0
    for source in sources:
        if files[-1] and size + source.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(source)
        size += source.nbytes
    return files


def write_safetensors(path: Path, sources: Sequence[TensorSource], metadata: dict[str, str] | None = None) -> FileRecord:
    """Write one file and sync it. Holds one tensor in memory at a time."""
    ordered = sorted(sources, key=lambda s: -ITEM_BYTES[s.dtype])
    header, _ = make_header([(s.name, s.dtype, s.shape) for s in ordered], metadata)
    digest = xxhash.xxh3_128(header)
    with path.open("wb") as file:
        file.write(header)
        for source in ordered:
            data = source.read()
            if len(data) != source.nbytes:
                raise FullshardError(f"{source.name} has {len(data)} bytes instead of {source.nbytes}")
            file.write(data)
            digest.update(data)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def write_checkpoint(
    checkpoint_dir: Place, sources: Sequence[TensorSource], *, step: int, limit: int = FILE_BYTES, **fields: Any
) -> Place:
    """Write and commit a checkpoint in a local directory; return its place. `fields`: other fields of the manifest."""
    if not isinstance(checkpoint_dir, Local):
        raise FullshardError(f"{checkpoint_dir} is not a local directory; write to one, and copy it there")
    if commit.is_checkpoint(checkpoint_dir.child(commit.checkpoint_name(step))):
        raise FullshardError(f"{checkpoint_dir} has a checkpoint of step {step} already; write to another directory")
    pending = commit.pending_checkpoint(checkpoint_dir, step, commit.new_nonce())
    missing = missing_directories(checkpoint_dir.path)
    try:
        with refusing_os_errors(f"write {pending.target}"), commit.begin(pending):
            manifest = _write_files(Path(str(pending.partial)), sources, limit, step, fields)
            commit.commit(pending, manifest.to_bytes())
    except BaseException:
        commit.abandon(pending)
        remove_empty(missing)
        raise
    return pending.target


def missing_directories(path: Path) -> list[Path]:
    """Of this directory and its parents those that do not exist yet, the innermost first."""
    with refusing_os_errors(f"write {path}"):
        return [p for p in (path, *path.parents) if not p.exists()]


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove those of the directories that are empty: they were created for a write that failed."""
    for path in directories:
        with suppress(OSError):
            path.rmdir()


def _write_files(directory: Path, sources: Sequence[TensorSource], limit: int, step: int, fields: dict[str, Any]) -> Manifest:
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    groups = split_into_files(sources, limit)
    for i, group in enumerate(groups):
        ordered = sorted(group, key=lambda s: -ITEM_BYTES[s.dtype])
        name = shard_name(i, len(groups))
        files[name] = write_safetensors(directory / name, ordered, {"format": "pt"})
        _, starts = make_header([(s.name, s.dtype, s.shape) for s in ordered], {"format": "pt"})
        for s, at in zip(ordered, starts, strict=True):
            whole = () if 0 in s.shape else (Chunk(name, at, (0,) * len(s.shape), s.shape),)
            tensors[s.name] = TensorRecord(s.shape, s.dtype, whole)
    return Manifest(step, dict(sorted(tensors.items())), files, created=round(time.time(), 3), **fields)


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Create a directory whose files `fill` writes. It appears complete or not at all."""
    if path.exists():
        raise FullshardError(f"{path} exists already; write to another directory, or remove it first")
    partial = path.with_name(f".{path.name}.{commit.new_nonce()}.partial")
    missing = missing_directories(path.parent)
    try:
        with refusing_os_errors(f"write {path}"):
            os.makedirs(partial)
            fill(partial)
            sync_directory(partial)
            os.rename(partial, path)
            sync_directory(path.parent)
    except BaseException:
        Local(partial).remove()
        remove_empty(missing)
        raise
