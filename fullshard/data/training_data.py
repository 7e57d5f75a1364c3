"""Opened data of any kind behind one interface: what it is called, what it holds, and its micro-batches."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fullshard.data.sample_batches import SampleBatches, SampleRules, StreamBatches
from fullshard.data.step_batches import BatchLoader, PlainLoader, StepBatches
from fullshard.data.token_batches import Batches, Boundaries, Packing
from fullshard.data.token_files import TokenFile

MOST_WORKERS = 4  # of a rank, unless more are asked for


@dataclass(frozen=True)
class Share:
    """What one rank takes of the data: `micro_batch` samples `accumulate` times a step; see `StepBatches`."""

    micro_batch: int
    accumulate: int = 1
    rank: int = 0
    ranks: int = 1
    last: int | None = None
    loader: BatchLoader = field(default_factory=PlainLoader)


class TrainingData(Protocol):
    """Data that was opened and checked."""

    @property
    def path(self) -> str:
        """What the data is called in errors."""

    @property
    def identity(self) -> str:
        """A short digest of the contents."""

    @property
    def threads(self) -> bool:
        """True if it may be read in a thread."""

    def about(self) -> dict[str, Any]:
        """What a checkpoint stores about it."""

    def workers(self, ranks_here: int) -> int:
        """A sensible number of worker processes for each of the ranks on this machine."""

    def batches(self, share: Share, *, seed: int, shuffle: bool) -> StepBatches: ...


@dataclass(frozen=True, eq=False)
class TokenData:
    """A directory of token files, cut into samples for a language model."""

    tokens: TokenFile
    sequence: int
    boundaries: Boundaries = "ignored"
    packing: Packing = "stream"

    threads = True

    @property
    def path(self) -> str:
        return str(self.tokens.path)

    @property
    def identity(self) -> str:
        """Of the token index, checksums included."""
        about = [self.tokens.vocab, self.tokens.tokenizer, str(self.tokens.dtype), self.tokens.shards]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]

    def about(self) -> dict[str, Any]:
        return {"tokens": len(self.tokens), "documents": self.tokens.documents, "identity": self.identity}

    def workers(self, ranks_here: int) -> int:
        return 0  # reading tokens takes less than handing them over

    def batches(self, share: Share, *, seed: int, shuffle: bool) -> Batches:
        return Batches(
            self.tokens,
            self.sequence,
            seed=seed,
            shuffle=shuffle,
            boundaries=self.boundaries,
            packing=self.packing,
            **vars(share),
        )


@dataclass(frozen=True, eq=False)
class SampleData:
    """Any other data set. `data`: one with a length and indices; or None, and `open` returns one to be iterated."""

    rules: SampleRules
    identity: str
    data: Any = None
    open: Callable[[], Iterable[Any]] | None = None
    classes: tuple[str, ...] = ()
    threads: bool = True

    @property
    def path(self) -> str:
        return self.rules.path

    def about(self) -> dict[str, Any]:
        count = {} if self.data is None else {"samples": len(self.data)}
        return count | ({"classes": list(self.classes)} if self.classes else {}) | {"identity": self.identity}

    def workers(self, ranks_here: int) -> int:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(MOST_WORKERS, cores // max(1, ranks_here) - 1))

    def batches(self, share: Share, *, seed: int, shuffle: bool) -> StepBatches:
        if self.open is not None:
            return StreamBatches(self.open, rules=self.rules, **vars(share))
        return SampleBatches(self.data, seed=seed, shuffle=shuffle, rules=self.rules, **vars(share))
