"""The share of one rank in the samples of each step, for any data.

Step s takes samples s·G … (s + 1)·G − 1 of the run's order, where G = ranks × accumulate × micro_batch is the global
batch: the same samples at every world size with the same G.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fullshard.base.errors import FullshardError


class BatchLoader(Protocol):
    """Loads micro-batches, ahead of time if it can. The results come in order, and are the same for every loader."""

    def each(self, load: Callable[[int], Any], firsts: Iterator[int]) -> Iterator[Any]:
        """`load(first)` for each of `firsts`."""

    def stream(self, read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The items of `read()`."""


class PlainLoader:
    """Loads a micro-batch when it is asked for."""

    def each(self, load: Callable[[int], Any], firsts: Iterator[int]) -> Iterator[Any]:
        """Nothing is loaded ahead: `load` is called as the result is taken."""
        return (load(first) for first in firsts)

    def stream(self, read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        return read()


class StepBatches(ABC):
    """The micro-batches of data rank `rank` of `ranks`, a step at a time.

    `cursor` counts the samples that all ranks have taken. Set it to resume, also on another number of ranks. `last`: the
    sample to stop before; None goes on for ever. Subclasses are dataclasses, which have these fields.
    """

    micro_batch: int
    accumulate: int
    rank: int
    ranks: int
    cursor: int
    last: int | None
    loader: BatchLoader

    def refuse_share(self) -> None:
        """Raise unless rank and cursor make sense."""
        if not 0 <= self.rank < self.ranks:
            raise FullshardError(f"rank {self.rank} is not one of {self.ranks} data ranks")
        if self.cursor % self.step_samples:
            raise FullshardError(
                f"cursor {self.cursor} is not at the start of a step of {self.step_samples} samples; keep the global batch"
            )

    @property
    def step_samples(self) -> int:
        """The global batch: samples that all ranks take in one step."""
        return self.ranks * self.accumulate * self.micro_batch

    @property
    def offset(self) -> int:
        """The first sample of this rank in a step, counted from the step's first."""
        return self.rank * self.accumulate * self.micro_batch

    def __iter__(self) -> Iterator[list[Any]]:
        while self.last is None or self.cursor < self.last:
            yield from self._steps(self.cursor)

    @abstractmethod
    def _steps(self, cursor: int) -> Iterator[list[Any]]:
        """Steps until the last, or until somebody sets the cursor elsewhere: what was loaded ahead is then of no use."""


class IndexedBatches(StepBatches):
    """Micro-batches of data in which any sample can be read at any time."""

    @abstractmethod
    def load(self, first: int) -> Any:
        """The micro-batch of the run's samples first … first + micro_batch − 1."""

    def firsts(self, cursor: int) -> Iterator[int]:
        """The first sample of each micro-batch of this rank, from the step at `cursor` on."""
        while self.last is None or cursor < self.last:
            for m in range(self.accumulate):
                yield cursor + self.offset + m * self.micro_batch
            cursor += self.step_samples

    def _steps(self, cursor: int) -> Iterator[list[Any]]:
        loaded = self.loader.each(self.load, self.firsts(cursor))
        try:
            while self.cursor == cursor and (self.last is None or cursor < self.last):
                step = [next(loaded) for _ in range(self.accumulate)]
                self.cursor = cursor = cursor + self.step_samples
                yield step
        finally:
            close(loaded)


def close(loaded: Iterator[Any]) -> None:
    """End what loads ahead."""
    if hasattr(loaded, "close"):
        loaded.close()
