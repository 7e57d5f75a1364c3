"""Writing checkpoints and safetensors files without an engine, a tensor at a time: imports, averages, exports."""

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fullshard.checkpoint import commit
from fullshard.checkpoint.file_writer import sync_directory
from fullshard.checkpoint.manifest import Chunk, FileRecord, Manifest, TensorRecord
from fullshard.checkpoint.place import Local, Place
from fullshard.checkpoint.safetensors import ITEM_BYTES, make_header
from fullshard.checkpoint.untrusted_files import refusing
from fullshard.errors import FullshardError

FILE_BYTES = 5 * 10**9  # of one file, as Hugging Face cuts them

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Source:
    """A tensor to be written. `read` gives its bytes when its turn comes, and is called once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Bytes]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def in_files(sources: Iterable[Source], limit: int = FILE_BYTES) -> list[list[Source]]:
    """Cut a list of tensors into files of at most `limit` bytes, or one tensor."""
    files: list[list[Source]] = [[]]
    size = 0
    for source in sources:
        if files[-1] and size + source.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(source)
        size += source.nbytes
    return files


def write_safetensors(path: Path, sources: Sequence[Source], metadata: dict[str, str] | None = None) -> FileRecord:
    """One file, durable; memory for one tensor at a time."""
    ordered = sorted(sources, key=lambda s: -ITEM_BYTES[s.dtype])
    header, _ = make_header([(s.name, s.dtype, s.shape) for s in ordered], metadata)
    digest = xxhash.xxh3_128(header)
    with path.open("wb") as file:
        file.write(header)
        for source in ordered:
            data = source.read()
            if len(data) != source.nbytes:
                raise FullshardError(f"{source.name} came with {len(data)} bytes instead of {source.nbytes}")
            file.write(data)
            digest.update(data)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def write_checkpoint(shelf: Place, sources: Sequence[Source], *, step: int, limit: int = FILE_BYTES, **about: Any) -> Place:
    """A whole checkpoint; where it lies."""
    if not isinstance(shelf, Local):
        raise FullshardError(f"{shelf} is no directory of this machine; write to one, and copy it there")
    if commit.is_checkpoint(shelf.child(commit.checkpoint_name(step))):
        raise FullshardError(f"{shelf} has a checkpoint of step {step} already; write to another directory")
    made, missing = commit.draft(shelf, step, commit.new_nonce()), missing_directories(shelf.path)
    try:
        with refusing(f"write {made.target}"), commit.begin(made):
            commit.commit(made, _fill(Path(str(made.staging)), sources, limit, step, about).to_bytes())
    except BaseException:
        commit.abandon(made)
        remove_empty(missing)
        raise
    return made.target


def missing_directories(path: Path) -> list[Path]:
    """This directory and those above it that do not exist yet, the innermost first."""
    with refusing(f"write {path}"):
        return [p for p in (path, *path.parents) if not p.exists()]


def remove_empty(directories: Iterable[Path]) -> None:
    """Undo what was made on the way to something that was not finished."""
    for path in directories:
        with suppress(OSError):
            path.rmdir()


def _fill(directory: Path, sources: Sequence[Source], limit: int, step: int, about: dict[str, Any]) -> Manifest:
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    groups = in_files(sources, limit)
    for i, group in enumerate(groups):
        ordered = sorted(group, key=lambda s: -ITEM_BYTES[s.dtype])
        name = f"shard-{i:05d}-of-{len(groups):05d}.safetensors"
        files[name] = write_safetensors(directory / name, ordered, {"format": "pt"})
        _, starts = make_header([(s.name, s.dtype, s.shape) for s in ordered], {"format": "pt"})
        for s, at in zip(ordered, starts, strict=True):
            whole = () if 0 in s.shape else (Chunk(name, at, (0,) * len(s.shape), s.shape),)
            tensors[s.name] = TensorRecord(s.shape, s.dtype, whole)
    return Manifest(step, dict(sorted(tensors.items())), files, created=round(time.time(), 3), **about)


def write_whole_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` make the files of a directory; it appears whole, or not at all."""
    if path.exists():
        raise FullshardError(f"{path} exists already; write to another directory, or remove it first")
    staging = path.with_name(f".{path.name}.{commit.new_nonce()}.partial")
    missing = missing_directories(path.parent)
    try:
        with refusing(f"write {path}"):
            os.makedirs(staging)
            fill(staging)
            sync_directory(staging)
            os.rename(staging, path)
            sync_directory(path.parent)
    except BaseException:
        Local(staging).remove()
        remove_empty(missing)
        raise
