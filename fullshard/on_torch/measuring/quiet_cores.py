"""Find undisturbed CPU cores on a shared machine.

A virtual core may share a physical core with other work. It is then up to half slower, for one second or for many, while
other cores are not. `QuietCores` binds this process to a core that is as fast as the fastest seen so far, and moves on
when it no longer is.
"""

import math
import os
from collections.abc import Callable
from typing import Self

NEAR = 1.08  # a core is quiet up to this factor of the best time; a busy neighbour costs a fifth or more
ROUNDS = 3  # over all cores, before the fastest is taken although it is not quiet
MAX_CORES = 16  # cores to choose from; each has to be timed


class QuietCores:
    """A context in which all threads of the process are bound to one core. `clock` times a small piece of work.

    `first_times` has the clock's time on every core, taken on entry. Where threads cannot be bound (macOS), the process
    stays where the system puts it.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.best = clock, math.inf
        self.cores: list[int] = []
        self.first_times: list[float] = []
        self.before: dict[int, set[int]] = {}

    def __enter__(self) -> Self:
        self.before = {thread: _cores_of(thread) for thread in _threads()}
        self.cores = _own(sorted(_cores_of(0)))
        try:
            for _ in range(max(1, len(self.cores))):
                self.move()
                self.first_times.append(self.time_core())
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for thread in _threads():
            _bind(thread, self.before.get(thread) or self.before.get(os.getpid()) or set())

    def time_core(self) -> float:
        """Time the clock's work on the current core."""
        seconds = self.clock()
        self.best = min(self.best, seconds)
        return seconds

    def settle(self) -> float:
        """Move to a quiet core, unless the current one is quiet. Returns the clock's time on the chosen core."""
        found: dict[int, float] = {}
        for _ in range(ROUNDS * max(1, len(self.cores))):
            seconds = self.time_core()
            if self.is_quiet(seconds) or not self.cores:
                return seconds
            found[self.cores[0]] = seconds
            self.move()
        while self.cores[0] != min(found, key=found.__getitem__):
            self.move()
        return self.time_core()

    def is_quiet(self, seconds: float) -> bool:
        return seconds <= NEAR * self.best

    def move(self) -> None:
        """Bind all threads to the next core. The current one becomes the last of the list."""
        self.cores = self.cores[1:] + self.cores[:1]
        for thread in _threads():
            _bind(thread, set(self.cores[:1]))


def _own(cores: list[int]) -> list[int]:
    """This rank's part of the node's cores, so that ranks do not disturb each other. At most MAX_CORES, evenly spaced."""
    ranks, rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    own = cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] or cores
    return own[:: max(1, -(-len(own) // MAX_CORES))]


def _threads() -> list[int]:
    """The ids of all threads of this process. Autograd's thread issues half of a step's work, so it must move too."""
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
