"""The cores of a shared machine, of which some are disturbed.

A core takes half as long again for everything, for a second or for many, while the next one does not: it may share a real
core with somebody else's work. `QuietCores` keeps this process on a core that is at the best pace seen so far, and looks for
another when it no longer is; or takes it to one core after the other, for what the machine does on the whole.
"""

import math
import os
from collections.abc import Callable
from typing import Self

NEAR = 1.08  # of the best pace: still undisturbed; a neighbour costs a fifth and more
ROUNDS = 3  # over all cores before one that is merely the fastest will do
MOST = 16  # cores to choose from: each costs a look


class QuietCores:
    """While entered, all threads of the process are on one core: `clock`, which times a bit of work, says which.

    `tour` is what it showed on every core at the beginning. Where threads cannot be bound to cores (macOS), it stays where it is.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.best = clock, math.inf
        self.cores: list[int] = []
        self.tour: list[float] = []
        self.before: dict[int, set[int]] = {}

    def __enter__(self) -> Self:
        self.before = {thread: _cores_of(thread) for thread in _threads()}
        self.cores = _own(sorted(_cores_of(0)))
        try:
            for _ in range(max(1, len(self.cores))):  # all of them once, for a best to hold the others against
                self.move()
                self.tour.append(self.look())
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for thread in _threads():
            _bind(thread, self.before.get(thread) or self.before.get(os.getpid()) or set())

    def look(self) -> float:
        """Seconds of the clock here and now."""
        seconds = self.clock()
        self.best = min(self.best, seconds)
        return seconds

    def settle(self) -> float:
        """Seconds of the clock where the process is afterwards: here, if it is quiet here, or else on the first core that is."""
        found: dict[int, float] = {}
        for _ in range(ROUNDS * max(1, len(self.cores))):
            seconds = self.look()
            if self.is_quiet(seconds) or not self.cores:
                return seconds
            found[self.cores[0]] = seconds
            self.move()
        while self.cores[0] != min(found, key=found.__getitem__):
            self.move()
        return self.look()

    def is_quiet(self, seconds: float) -> bool:
        return seconds <= NEAR * self.best

    def move(self) -> None:
        """To the next core; this one is the last to be tried again."""
        self.cores = self.cores[1:] + self.cores[:1]
        for thread in _threads():
            _bind(thread, set(self.cores[:1]))


def _own(cores: list[int]) -> list[int]:
    """This rank's part of the node's cores, or ranks would disturb one another; of many, some from all over it."""
    ranks, rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    own = cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] or cores
    return own[:: max(1, -(-len(own) // MOST))]


def _threads() -> list[int]:
    """Autograd's among them: half of a step's work is issued there."""
    return [int(name) for name in os.listdir("/proc/self/task")] if os.path.isdir("/proc/self/task") else []


def _cores_of(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except (AttributeError, OSError):  # no such call on this system, or the thread has ended
        return set()


def _bind(thread: int, cores: set[int]) -> None:
    try:
        if cores:
            os.sched_setaffinity(thread, cores)
    except (AttributeError, OSError):
        pass
