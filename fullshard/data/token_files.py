"""Token files: a directory of memory-mapped shards and one index.

    index.json     version, dtype, vocabulary, tokenizer, and for each shard its tokens, documents, checksums
    00000.tokens   the tokens of the documents, one after the other, little-endian
    00000.ends     where each document ends, in tokens from the start of the shard, as uint64
    00000.answers  if answers were marked: one uint8 per token, 1 = to be predicted, 0 = not

The directory is written under another name and renamed when it is complete: a reader sees all of it or nothing.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fullshard.base.errors import FullshardError
from fullshard.base.reading import LARGEST_INTEGER, is_plain_file, parse_json, read_text

VERSION = 1
SHARD_TOKENS = 1 << 28
ENDS = np.dtype("<u8")
ANSWERS = np.dtype("u1")
DTYPES = ("uint8", "uint16", "uint32", "uint64")
NAME = re.compile(r"\w[\w.-]{0,200}", re.ASCII)  # of a shard: its files cannot be outside the directory


def smallest_dtype(vocab: int) -> str:
    """The narrowest unsigned integer type that holds every token."""
    return "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32"


# -- writing ----------------------------------------------------------------------------------------------


class TokenWriter:
    """Writes token files, document by document. Use it as a context manager: it commits on success, and leaves nothing
    behind on failure."""

    def __init__(self, path: str | Path, vocab: int, tokenizer: str, *, shard_tokens: int = SHARD_TOKENS):
        self.path = Path(path)
        if self.path.exists():
            raise FullshardError(f"{self.path} exists already; write to another directory, or remove it first")
        self.partial = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        self.partial.mkdir(parents=True)
        self.header: dict[str, Any] = {"version": VERSION, "dtype": smallest_dtype(vocab), "vocab": vocab, "tokenizer": tokenizer}
        self.shard_tokens = shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.documents: list[NDArray[Any]] = []
        self.answers: list[NDArray[np.uint8]] = []
        self.marked: bool | None = None  # whether documents come with answers; the first one decides
        self.buffered = 0  # tokens in `documents`

    def add(self, document: Iterable[int] | NDArray[Any], answers: Iterable[int] | NDArray[Any] | None = None) -> None:
        """Append a document; an empty one is left out. `answers`: for each token whether it is to be predicted."""
        tokens = _row(document, "tokens")
        if not tokens.size:
            return
        lowest, highest = int(tokens.min()), int(tokens.max())
        if highest >= self.header["vocab"] or lowest < 0:
            raise FullshardError(
                f"token {min(lowest, 0) or highest} does not fit a vocabulary of {self.header['vocab']}; "
                "pass the tokenizer's own size"
            )
        self._add_answers(tokens.size, answers)
        self.documents.append(tokens.astype(self.header["dtype"]))
        self.buffered += tokens.size
        if self.buffered >= self.shard_tokens:
            self._flush()

    def _add_answers(self, tokens: int, answers: Iterable[int] | NDArray[Any] | None) -> None:
        if self.marked is not None and self.marked != (answers is not None):
            raise FullshardError(
                f"{self.path}: some documents have answers marked and some have not; mark all of them, or pack them apart"
            )
        self.marked = answers is not None
        if answers is None:
            return
        row = _row(answers, "answers")
        if row.size != tokens:
            raise FullshardError(f"a document of {tokens} tokens has {row.size} answers; give one for each token, 1 or 0")
        self.answers.append((row != 0).astype(np.uint8))

    def _flush(self) -> None:
        if not self.documents:
            return
        tokens = np.concatenate(self.documents)
        ends = np.cumsum([d.size for d in self.documents], dtype=np.uint64)
        shard: dict[str, Any] = {"name": f"{len(self.shards):05d}", "tokens": int(tokens.size), "documents": int(ends.size)}
        files: dict[str, NDArray[Any]] = {"tokens": tokens, "ends": ends}
        if self.answers:
            files["answers"] = np.concatenate(self.answers)
            shard["answers"] = int(files["answers"].sum())
        shard["crc32"] = {suffix: self._write(shard["name"], suffix, data) for suffix, data in files.items()}
        self.shards.append(shard)
        self.documents, self.answers, self.buffered = [], [], 0

    def _write(self, name: str, suffix: str, data: NDArray[Any]) -> int:
        raw = data.astype(data.dtype.newbyteorder("<")).tobytes()
        with open(self.partial / f"{name}.{suffix}", "wb") as file:
            file.write(raw)
            os.fsync(file.fileno())
        return zlib.crc32(raw)

    def commit(self) -> None:
        """Write the index and rename the directory to its final name."""
        self._flush()
        if not self.shards:
            raise FullshardError(f"nothing to write to {self.path}: the input has no tokens")
        (self.partial / "index.json").write_text(json.dumps({**self.header, "shards": self.shards}, indent=1))
        os.replace(self.partial, self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)


def _row(given: Iterable[int] | NDArray[Any], what: str) -> NDArray[Any]:
    """The given integers as a one-dimensional array. Raises for other types: nothing is rounded."""
    try:
        row = np.asarray(given if isinstance(given, np.ndarray) else list(given))
    except (TypeError, ValueError):
        row = np.empty((), object)
    if row.ndim != 1 or (row.size and row.dtype.kind not in "biu"):
        raise FullshardError(f"a document's {what} are a list of integers, not {type(given).__name__} of {row.dtype}")
    return row


# -- reading ----------------------------------------------------------------------------------------------


class TokenFile:
    """A directory of token shards, read as one long sequence of tokens.

    File sizes are checked when it is opened, tokens and document ends when they are read, and checksums by `verify`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        index = _read_index(self.path)
        self.vocab: int = index["vocab"]
        self.tokenizer: str = index["tokenizer"]
        self.dtype = np.dtype(index["dtype"]).newbyteorder("<")
        self.shards: list[dict[str, Any]] = index["shards"]
        self.has_answers = "answers" in self.shards[0]
        self.token_maps = [self._map(s, "tokens", self.dtype, s["tokens"]) for s in self.shards]
        self.end_maps = [self._map(s, "ends", ENDS, s["documents"]) for s in self.shards]
        self.answer_maps = [self._map(s, "answers", ANSWERS, s["tokens"]) for s in self.shards if self.has_answers]
        self.starts = np.cumsum([0, *[s["tokens"] for s in self.shards]])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        return sum(s["documents"] for s in self.shards)

    @property
    def answers(self) -> int:
        """The number of tokens to be predicted: those marked as answers, or all."""
        return sum(s["answers"] for s in self.shards) if self.has_answers else len(self)

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        """`length` tokens from `start` on, across shards."""
        tokens = self._read(self.token_maps, start, length).astype(np.int64)
        if tokens.size and (largest := int(tokens.max())) >= self.vocab:
            raise FullshardError(self._outside(largest))
        return tokens

    def read_answers(self, start: int, length: int) -> NDArray[np.bool_]:
        """Whether each of these tokens is to be predicted. All are if no answers were marked."""
        if not self.has_answers:
            return np.ones(length, np.bool_)
        return self._read(self.answer_maps, start, length) != 0

    def _read(self, maps: list[NDArray[Any]], start: int, length: int) -> NDArray[Any]:
        if start < 0 or start + length > len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)}")
        parts = [maps[0][:0]]
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while length > 0:
            offset = start - int(self.starts[shard])
            part = maps[shard][offset : offset + length]
            parts.append(part)
            start, length, shard = start + part.size, length - part.size, shard + 1
        return np.concatenate(parts)

    def ends(self) -> NDArray[np.int64]:
        """Where each document ends, in tokens from the start of the first shard."""
        for shard, ends in zip(self.shards, self.end_maps, strict=True):
            if int(ends[-1]) != shard["tokens"] or int(ends[0]) == 0 or not (ends[1:] > ends[:-1]).all():
                file = self.path / f"{shard['name']}.ends"
                raise FullshardError(
                    f"{file} is damaged: document ends do not increase up to the shard's last token; pack the data again"
                )
        return np.concatenate([e.astype(np.int64) + base for e, base in zip(self.end_maps, self.starts, strict=False)])

    def verify(self) -> None:
        """Compare all bytes with their checksums, and check tokens, answers and document ends. Raises on any damage."""
        maps = {"tokens": self.token_maps, "ends": self.end_maps, "answers": self.answer_maps}
        for i, shard in enumerate(self.shards):
            for suffix, want in shard["crc32"].items():
                if zlib.crc32(maps[suffix][i].data) != want:
                    file = self.path / f"{shard['name']}.{suffix}"
                    raise FullshardError(f"{file} is damaged: its checksum does not match the index; pack the data again")
        if (largest := max(int(tokens.max()) for tokens in self.token_maps)) >= self.vocab:
            raise FullshardError(self._outside(largest))
        if any(int(answers.max()) > 1 for answers in self.answer_maps):
            raise FullshardError(f"{self.path} is damaged: an answer is neither 0 nor 1; pack the data again")
        self.ends()

    def _outside(self, token: int) -> str:
        return f"{self.path} is damaged: token {token} is outside its vocabulary of {self.vocab}; pack the data again"

    def _map(self, shard: dict[str, Any], suffix: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        file = self.path / f"{shard['name']}.{suffix}"
        if not is_plain_file(file):
            raise FullshardError(f"{file} is missing; pack the data again")
        if (size := file.stat().st_size) != count * dtype.itemsize:
            raise FullshardError(
                f"{file} is damaged: it has {size} bytes, the index says {count * dtype.itemsize}; pack the data again"
            )
        try:
            return np.memmap(file, dtype, "r", shape=(count,))
        except OSError as error:
            raise FullshardError(f"cannot read {file}: {error.strerror}") from None


def _read_index(path: Path) -> dict[str, Any]:
    if not is_plain_file(path / "index.json"):
        raise FullshardError(
            f"{path} is not a directory of token files (no index.json); make one with: fullshard data pack TEXT -o DIR"
        )
    try:
        index = parse_json(read_text(path / "index.json", "index"))
    except FullshardError as error:
        raise FullshardError(f"{path}/index.json is damaged ({error}); pack the data again") from None
    if not isinstance(index, dict) or type(index.get("version")) is not int or index["version"] != VERSION:
        version = index.get("version") if isinstance(index, dict) else None
        raise FullshardError(f"{path} has version {version!r}; this fullshard reads version {VERSION}: pack the data again")
    if not _is_valid(index):
        raise FullshardError(f"{path}/index.json is damaged (entries are missing or contradict each other); pack the data again")
    for shard in index["shards"]:
        if not NAME.fullmatch(shard["name"]):
            raise FullshardError(
                f"{path}/index.json names the shard {shard['name']!r}, which is not a file there; pack the data again"
            )
    return index


def _is_valid(index: dict[str, Any]) -> bool:
    """Whether the index has all fields with valid types, and the same files for every shard."""
    try:
        shards = index["shards"]
        suffixes = {"tokens", "ends"} | ({"answers"} & shards[0].keys())
        numbers = [index["vocab"], *[s[key] for s in shards for key in ("tokens", "documents")]]
        sums = [n for s in shards for n in (*s["crc32"].values(), s.get("answers", 0))]
        return (
            index["dtype"] in DTYPES
            and isinstance(index["tokenizer"], str)
            and all(type(n) is int and 0 < n <= LARGEST_INTEGER for n in numbers)
            and all(type(n) is int and 0 <= n <= LARGEST_INTEGER for n in sums)
            and all(isinstance(s["name"], str) and s["crc32"].keys() == suffixes for s in shards)
            and len({"answers" in s for s in shards}) == 1
            and all(s.get("answers", 0) <= s["tokens"] and s["documents"] <= s["tokens"] for s in shards)
        )
    except (KeyError, IndexError, TypeError, AttributeError):
        return False
