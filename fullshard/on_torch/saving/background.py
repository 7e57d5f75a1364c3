"""A thread that does one thing after another beside training."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

T = TypeVar("T")
NICE = 10  # a tenth of a core that somebody else wants
Patience = Literal["none", "nice", "idle"]

Queue = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class Background:
    """How the thread, and those that it starts, give way where others want a core. `nice`: they get little of it. `idle`:
    next to nothing, and they interrupt nobody: for a machine whose cores do the training. Ranks wait for each other many
    times in a step, which leaves room, and where they wait for the thread itself, all of it.

    It is a daemon, and lives until `close`: starting one for each piece of work would make training wait for it, and
    waiting for one at the end would keep a process that failed, and whose other ranks are gone.
    """

    def __init__(self, name: str, *, patience: Patience = "none"):
        self._queue: Queue = SimpleQueue()
        threading.Thread(target=_work, args=(self._queue, patience), daemon=True, name=name).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put((work, future))
        return future

    def close(self) -> None:
        """No more work comes."""
        self._queue.put(None)


def _work(queue: Queue, patience: Patience) -> None:
    with suppress(OSError, AttributeError):  # on Linux it is each thread's own
        if patience == "idle":
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        elif patience == "nice":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    while (found := queue.get()) is not None:
        work, future = found
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del work, future, found  # nothing of it is kept alive by a thread that waits
