"""From tokens to the micro-batches of one rank, in one global order."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fullshard.data.order import Order
from fullshard.data.tokens import TokenFile
from fullshard.errors import FullshardError

IGNORED = -100

Batch = dict[str, NDArray[np.int64]]


@dataclass
class Batches:
    """The micro-batches of data rank `rank` of `ranks`, a step at a time.

    Step s takes samples s·G … (s + 1)·G − 1 of the run's order, G = ranks × accumulate × micro_batch: the same
    set at every world size with the same G. `cursor` counts the samples all ranks have taken; setting it
    resumes, at another number of ranks too. With `within_documents`, no token has to predict the first token
    of the next document.
    """

    source: TokenFile
    sequence: int
    micro_batch: int
    accumulate: int = 1
    rank: int = 0
    ranks: int = 1
    seed: int = 0
    shuffle: bool = True
    within_documents: bool = False
    cursor: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise FullshardError(
                f"{self.source.path} has {len(self.source)} tokens, too few for one sample of {self.sequence} + 1; "
                "pack more text, or use a shorter sequence"
            )
        if not 0 <= self.rank < self.ranks:
            raise FullshardError(f"rank {self.rank} is not one of {self.ranks} data ranks")
        if self.cursor % self.step_samples:
            raise FullshardError(
                f"cursor {self.cursor} is not at the start of a step of {self.step_samples} samples; keep the global batch"
            )
        self.order = Order(self.samples, self.seed, self.shuffle)
        self.last_tokens = self.source.ends().astype(np.int64) - 1 if self.within_documents else None

    @property
    def samples(self) -> int:
        """Whole samples in one epoch; each needs one token more than it is long, shared with the next."""
        return (len(self.source) - 1) // self.sequence

    @property
    def step_samples(self) -> int:
        return self.ranks * self.accumulate * self.micro_batch

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            first = self.cursor + self.rank * self.accumulate * self.micro_batch
            step = [self._micro_batch(first + m * self.micro_batch) for m in range(self.accumulate)]
            self.cursor += self.step_samples
            yield step

    def _micro_batch(self, first: int) -> Batch:
        rows = [self.sample(first + row) for row in range(self.micro_batch)]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def sample(self, i: int) -> Batch:
        """Sample `i` of the run."""
        start = self.order[i] * self.sequence
        tokens = self.source.read(start, self.sequence + 1)
        labels = tokens[1:].copy()
        if self.last_tokens is not None:
            low, high = np.searchsorted(self.last_tokens, [start, start + self.sequence])
            labels[self.last_tokens[low:high] - start] = IGNORED
        return {"input_ids": tokens[:-1], "labels": labels}
