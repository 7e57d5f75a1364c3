"""Loads micro-batches ahead of the step: in worker processes through torch's DataLoader, or in a thread.

The batches are the same as without: workers change only when a batch is made.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fullshard.base.errors import FullshardError, first_line
from fullshard.base.parent_death import die_with_parent
from fullshard.data import seeding
from fullshard.data.thread_loader import in_thread
from fullshard.on_torch.tensors.batch_tree import map_tensors

LINGER = 60  # seconds that a worker outlives SIGTERM: the run still ends at a step, with a checkpoint


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a worker, to be raised in the rank."""

    sentence: str


@dataclass(frozen=True)
class AheadLoader:
    """`workers` processes, each `prefetch` micro-batches ahead. Without workers: a thread, or with `threads` False nothing."""

    workers: int
    prefetch: int
    seed: int = 0
    threads: bool = True
    pin: bool = False

    def each(self, load: Callable[[int], Any], firsts: Iterator[int]) -> Iterator[Any]:
        if self.workers:
            return self._from_workers(_Indexed(load), self.workers, firsts)
        return self._here(load(first) for first in firsts)

    def stream(self, read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if self.workers:
            return self._from_workers(_Streamed(read), 1, None)  # a second one would read the same stream
        return self._here(read())

    def _here(self, items: Iterator[Any]) -> Iterator[Any]:
        return self._ahead(items, self.prefetch) if self.threads and self.prefetch else items

    def _from_workers(self, dataset: Dataset, workers: int, firsts: Iterator[int] | None) -> Iterator[Any]:
        forks = "fork" in multiprocessing.get_all_start_methods()
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=firsts,
            num_workers=workers,
            prefetch_factor=max(1, self.prefetch),
            collate_fn=_tensors,
            worker_init_fn=partial(_begin_worker, os.getpid()),
            multiprocessing_context="fork" if forks else None,  # a data set of the user's need not be picklable
            generator=torch.Generator().manual_seed(self.seed % 2**63),  # the model's random numbers stay as they are
        )
        items = _raising(iter(loader))
        return self._ahead(items, 1) if self.pin else items  # torch's own pinning makes lists of tuples

    def _ahead(self, items: Iterator[Any], count: int) -> Iterator[Any]:
        return in_thread(items, count, _pinned) if self.pin else in_thread(items, count)


def _raising(items: Iterator[Any]) -> Iterator[Any]:
    """The items of workers. Raises what went wrong in one of them."""
    try:
        for item in items:
            if isinstance(item, _Failure):
                raise FullshardError(item.sentence)
            yield item
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise FullshardError(
            f"a data worker died ({first_line(error)}); write data.workers = 0 to see its error, or fewer data.workers"
        ) from error


def _tensors(item: Any) -> Any:
    """Arrays become tensors, which travel in shared memory; arrays would go through a pipe."""
    return map_tensors(item, lambda _, tensor: tensor)


class _Indexed(Dataset):
    def __init__(self, load: Callable[[int], Any]):
        self.load = load

    def __getitem__(self, first: int) -> Any:
        try:
            return self.load(first)
        except Exception as error:
            return _failure(error)


class _Streamed(IterableDataset):
    def __init__(self, read: Callable[[], Iterator[Any]]):
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.read()
        except Exception as error:
            yield _failure(error)


def _failure(error: Exception) -> _Failure:
    own = isinstance(error, FullshardError)
    return _Failure(str(error) if own else f"a data worker raised {type(error).__name__}: {first_line(error)}")


def _begin_worker(rank: int, worker: int) -> None:
    """A run ends at a step boundary after a signal: until then it needs its workers. None survives its rank, process `rank`: the
    launcher sees that a copy of its own has ended when nobody has the pipe of that copy any more, and a fork has it, too."""
    die_with_parent(rank)
    signal.set_wakeup_fd(-1)  # it is the rank's, which would count a second signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(LINGER))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library would warn about the fork


def _pinned(batch: Any) -> Any:
    return map_tensors(batch, lambda _, t: t.pin_memory())


def loader(workers: int, prefetch: int, *, seed: int = 0, threads: bool = True) -> AheadLoader:
    """A loader for this rank's device. `threads`: False if the data may not be read in a thread."""
    return AheadLoader(workers, prefetch, seed, threads, torch.cuda.is_available())


def collate(samples: Sequence[Any]) -> Any:
    """torch's default_collate: a tree of stacked tensors."""
    found = default_collate(list(samples))
    return tuple(found) if isinstance(found, list) else found  # a list would be a list of micro-batches


@contextmanager
def seeded(seed: int, i: int) -> Iterator[None]:
    """Inside, random numbers of Python, numpy and torch on the CPU depend on `seed` and `i` alone. Afterwards as before."""
    tensors = torch.get_rng_state()
    torch.default_generator.manual_seed(seeding.sample_seed(seed, i) % 2**63)
    try:
        with seeding.seeded(seed, i):
            yield
    finally:
        torch.set_rng_state(tensors)
