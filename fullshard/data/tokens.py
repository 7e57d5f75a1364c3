"""Token files: a directory of memory-mapped shards and one index.

    index.json     version, dtype, vocabulary, tokenizer, and for each shard its tokens, documents, checksums
    00000.tokens   the tokens of the documents, one after the other, little-endian
    00000.ends     where each document ends, in tokens from the start of the shard, as uint64

Written beside its target and renamed when whole: a reader sees all of it or nothing.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fullshard.errors import FullshardError

VERSION = 1
SHARD_TOKENS = 1 << 28


def smallest_dtype(vocab: int) -> str:
    """The narrowest unsigned integer that holds every token."""
    return "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32"


class TokenWriter:
    """Appends documents; as a context manager it commits on success and leaves nothing on failure."""

    def __init__(self, path: str | Path, vocab: int, tokenizer: str, *, shard_tokens: int = SHARD_TOKENS):
        self.path = Path(path)
        if self.path.exists():
            raise FullshardError(f"{self.path} exists already; write to another directory, or remove it first")
        self.staging = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        self.staging.mkdir(parents=True)
        self.about: dict[str, Any] = {"version": VERSION, "dtype": smallest_dtype(vocab), "vocab": vocab, "tokenizer": tokenizer}
        self.shard_tokens = shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.documents: list[NDArray[Any]] = []
        self.waiting = 0  # tokens in `documents`

    def add(self, document: Iterable[int] | NDArray[Any]) -> None:
        """One document; an empty one is left out."""
        tokens = np.asarray(document if isinstance(document, np.ndarray) else list(document), dtype=np.int64)
        if not tokens.size:
            return
        if int(tokens.max()) >= self.about["vocab"] or int(tokens.min()) < 0:
            raise FullshardError(
                f"token {int(tokens.max())} does not fit a vocabulary of {self.about['vocab']}; pass the tokenizer's own size"
            )
        self.documents.append(tokens.astype(self.about["dtype"]))
        self.waiting += tokens.size
        if self.waiting >= self.shard_tokens:
            self._flush()

    def _flush(self) -> None:
        if not self.documents:
            return
        name = f"{len(self.shards):05d}"
        tokens = np.concatenate(self.documents)
        ends = np.cumsum([d.size for d in self.documents], dtype=np.uint64)
        checksums = {}
        for suffix, data in (("tokens", tokens), ("ends", ends)):
            raw = data.astype(data.dtype.newbyteorder("<")).tobytes()
            checksums[suffix] = zlib.crc32(raw)
            with open(self.staging / f"{name}.{suffix}", "wb") as file:
                file.write(raw)
                os.fsync(file.fileno())
        self.shards.append({"name": name, "tokens": int(tokens.size), "documents": int(ends.size), "crc32": checksums})
        self.documents, self.waiting = [], 0

    def commit(self) -> None:
        self._flush()
        if not self.shards:
            raise FullshardError(f"nothing to write to {self.path}: the input has no tokens")
        (self.staging / "index.json").write_text(json.dumps({**self.about, "shards": self.shards}, indent=1))
        os.replace(self.staging, self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)


class TokenFile:
    """A directory of token shards, read as one long row of tokens."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        index = _read_index(self.path)
        self.vocab: int = index["vocab"]
        self.tokenizer: str = index["tokenizer"]
        self.dtype = np.dtype(index["dtype"]).newbyteorder("<")
        self.shards: list[dict[str, Any]] = index["shards"]
        self.maps = [self._map(s, "tokens", self.dtype, s["tokens"]) for s in self.shards]
        self.starts = np.cumsum([0, *[s["tokens"] for s in self.shards]])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        return sum(s["documents"] for s in self.shards)

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """`length` tokens from `start`, across shards where they end."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)}")
        parts = []
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while length > 0:
            offset = start - int(self.starts[shard])
            part = self.maps[shard][offset : offset + length]
            parts.append(part)
            start, length, shard = start + part.size, length - part.size, shard + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def ends(self) -> NDArray[np.uint64]:
        """Where each document ends, in tokens from the very start."""
        rows = [
            self._map(s, "ends", np.dtype("<u8"), s["documents"]) + np.uint64(base)
            for s, base in zip(self.shards, self.starts, strict=False)
        ]
        return np.concatenate(rows)

    def verify(self) -> None:
        """Raise unless every byte is what was written."""
        for shard in self.shards:
            for suffix, want in shard["crc32"].items():
                file = self.path / f"{shard['name']}.{suffix}"
                if zlib.crc32(file.read_bytes()) != want:
                    raise FullshardError(f"{file} is damaged: its checksum is not the index's; pack the data again")

    def _map(self, shard: dict[str, Any], suffix: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        file = self.path / f"{shard['name']}.{suffix}"
        if not file.is_file():
            raise FullshardError(f"{file} is missing; pack the data again")
        if (size := file.stat().st_size) != count * dtype.itemsize:
            raise FullshardError(
                f"{file} has {size} bytes, the index says {count * dtype.itemsize}: it is damaged; pack the data again"
            )
        return np.memmap(file, dtype, "r", shape=(count,))


def _read_index(path: Path) -> dict[str, Any]:
    if not (path / "index.json").is_file():
        raise FullshardError(
            f"{path} is not a directory of token files (no index.json); make one with: fullshard data pack TEXT -o DIR"
        )
    try:
        index = json.loads((path / "index.json").read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FullshardError(f"{path}/index.json is damaged ({error}); pack the data again") from None
    if not isinstance(index, dict) or index.get("version") != VERSION:
        version = index.get("version") if isinstance(index, dict) else None
        raise FullshardError(f"{path} is of version {version!r}; this fullshard reads version {VERSION}: pack the data again")
    return index
