"""Micro-batches of any samples: of a data set with a length and indices, or of one that can only be read in its order."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from fullshard.base.errors import FullshardError, a_kind, first_line
from fullshard.data.collate import Collate, collated, stack_rows
from fullshard.data.objective_samples import KeepSample, MakeSample
from fullshard.data.sample_order import Order
from fullshard.data.step_batches import BatchLoader, IndexedBatches, PlainLoader, StepBatches, close

REMEDY = "make their shapes equal, or write data.collate = 'file.py:callable'"
Seeded = Callable[[int, int], AbstractContextManager[Any]]


@dataclass(frozen=True)
class SampleRules:
    """How the rows of a data set become samples, and samples a batch.

    `path` names the data set in errors. `remedy`: what to write if samples do not fit together. `seeded(seed, i)`: a context
    in which random numbers depend on `seed` and `i` alone.
    """

    path: str = "the data set"
    make: MakeSample = field(default_factory=KeepSample)
    collate: Collate = stack_rows
    remedy: str = REMEDY
    seeded: Seeded | None = None

    def sample(self, row: Any, i: int, place: str) -> Any:
        """Sample `i` of the run from a row."""
        return self.make(row, i, place)

    def batch(self, samples: Sequence[Any], places: Sequence[str]) -> Any:
        return collated(self.collate, samples, places, self.remedy)


@dataclass
class SampleBatches(IndexedBatches):
    """The micro-batches of one rank from a data set with `__len__` and `__getitem__`; see `StepBatches`.

    Each epoch has an order of its own, by `seed`. The same samples at every world size with the same global batch.
    """

    data: Any
    micro_batch: int
    accumulate: int = 1
    rank: int = 0
    ranks: int = 1
    seed: int = 0
    shuffle: bool = True
    rules: SampleRules = field(default_factory=SampleRules)
    cursor: int = 0
    last: int | None = None
    loader: BatchLoader = field(default_factory=PlainLoader)

    def __post_init__(self) -> None:
        if not len(self.data):
            raise FullshardError(f"{self.rules.path} has no samples; give data with at least one")
        self.refuse_share()
        self.order = Order(len(self.data), self.seed, self.shuffle)

    def load(self, first: int) -> Any:
        places = [self.place(self.order[i]) for i in range(first, first + self.micro_batch)]
        samples = [self.sample(first + row, place) for row, place in enumerate(places)]
        return self.rules.batch(samples, places)

    def sample(self, i: int, place: str = "") -> Any:
        """Sample `i` of the run. Random numbers that the data set draws depend on `seed` and `i` alone."""
        index = self.order[i]
        place = place or self.place(index)
        with self.rules.seeded(self.seed, i) if self.rules.seeded else nullcontext():
            try:
                row = self.data[index]
            except FullshardError:
                raise
            except Exception as error:
                raise FullshardError(f"{place} cannot be read: {type(error).__name__}: {first_line(error)}") from error
            return self.rules.sample(row, i, place)

    def place(self, index: int) -> str:
        """Names a sample in errors."""
        return self.data.place(index) if hasattr(self.data, "place") else f"{self.rules.path}, sample {index}"


@dataclass
class StreamBatches(StepBatches):
    """The micro-batches of one rank from an iterable data set, in its own order; see `StepBatches`.

    Every rank reads the whole stream and keeps its rows, so that a step has the same samples at every world size. To resume,
    the samples before the cursor are read again and dropped. A data set with `state_dict` and `load_state_dict` resumes
    without that: `state` is its state at the cursor, as JSON.

    `open` returns the data set anew. `say` is told how long a resume took.
    """

    open: Callable[[], Iterable[Any]]
    micro_batch: int
    accumulate: int = 1
    rank: int = 0
    ranks: int = 1
    rules: SampleRules = field(default_factory=SampleRules)
    cursor: int = 0
    last: int | None = None
    loader: BatchLoader = field(default_factory=PlainLoader)
    state: str | None = None
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        self.refuse_share()
        self.state_cursor = self.cursor  # of `state`
        self.reading = False

    def resume(self, cursor: int, state: str | None) -> None:
        """Go on at `cursor`. `state`: the data set's there, if it had one."""
        self.cursor = self.state_cursor = cursor
        self.state = state

    def _steps(self, cursor: int) -> Iterator[list[Any]]:
        state, at = (self.state, self.state_cursor) if self.state is not None and self.state_cursor <= cursor else (None, 0)
        read, self.reading = self.loader.stream(lambda: self._read(cursor, state, at)), False
        try:
            while self.cursor == cursor and (self.last is None or cursor < self.last):
                following = next(read, None)
                if following is None and self.last is not None and cursor:
                    self.last = cursor  # held-out data may be short
                    return
                if following is None:
                    raise FullshardError(self._ended(cursor))
                step, self.state, line = following
                if line:
                    self.say(line)
                self.cursor = self.state_cursor = cursor = cursor + self.step_samples
                self.reading = True
                yield step
        finally:
            close(read)

    @property
    def reads_again(self) -> bool:
        """True if the next step waits until the samples before the cursor were read again."""
        return bool(self.cursor) and not self.reading

    def _ended(self, cursor: int) -> str:
        return (
            f"{self.rules.path} ended in the step after sample {cursor}: a step takes {self.step_samples}; "
            f"give more samples, or write train.steps = {max(1, cursor // self.step_samples)}"
        )

    def _read(self, cursor: int, state: str | None, at: int) -> Iterator[tuple[list[Any], str | None, str]]:
        """Of each step from `cursor` on: its micro-batches, the data set's state after it, a line to say. `state`: at `at`."""
        began = time.perf_counter()
        data = self.open()
        if state is not None:
            data.load_state_dict(json.loads(state))  # type: ignore[attr-defined]
        rows = iter(data)
        skipped = sum(1 for _ in islice(rows, cursor - at))
        line = f"read {skipped:,} samples of {self.rules.path} again in {time.perf_counter() - began:.1f} s to resume"
        if skipped < cursor - at:
            return
        while len(step := self._take(rows, cursor)) == self.accumulate:
            yield step, _json_state(data), line if skipped else ""
            cursor, skipped = cursor + self.step_samples, 0

    def _take(self, rows: Iterator[Any], cursor: int) -> list[Any]:
        """This rank's micro-batches of one step; fewer if the data ends in it. Reads the other ranks' rows too."""
        samples: list[Any] = []
        count = 0
        for count, row in enumerate(self._rows(rows), 1):
            if self.offset < count <= self.offset + self.accumulate * self.micro_batch:
                i = cursor + count - 1
                samples.append(self.rules.sample(row, i, self.place(i)))
        if count < self.step_samples:
            return []
        size = self.micro_batch
        firsts = range(0, self.accumulate * size, size)
        places = [self.place(cursor + self.offset + row) for row in range(len(samples))]
        return [self.rules.batch(samples[f : f + size], places[f : f + size]) for f in firsts]

    def _rows(self, rows: Iterator[Any]) -> Iterator[Any]:
        """The rows of one step."""
        try:
            yield from islice(rows, self.step_samples)
        except FullshardError:
            raise
        except Exception as error:
            raise FullshardError(f"{self.rules.path} raised {type(error).__name__}: {first_line(error)}") from error

    def place(self, i: int) -> str:
        return f"{self.rules.path}, sample {i}"


def _json_state(data: Any) -> str | None:
    """The state of a data set that can tell it, as JSON; None otherwise."""
    if not (hasattr(data, "state_dict") and hasattr(data, "load_state_dict")):
        return None
    try:
        return json.dumps(data.state_dict())
    except (TypeError, ValueError):
        return None


def is_indexed(data: Any, path: str) -> bool:
    """True for a data set with a length and indices, False for one that can only be iterated. Raises for anything else."""
    iterable_only = any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__)  # has __getitem__ in torch
    if isinstance(data, str | bytes | dict):
        raise FullshardError(f"{path} returned {a_kind(data)}; return a list of samples, or a torch Dataset or IterableDataset")
    if not iterable_only and hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return True
    if not hasattr(data, "__iter__"):
        raise FullshardError(
            f"{path} returned {a_kind(data)}; return an object with __len__ and __getitem__, or with __iter__: a data set"
        )
    return False
