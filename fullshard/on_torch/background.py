"""A thread that does one thing after another beside training."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
PATIENT = 10  # nice: a tenth of a core that somebody else wants

Queue = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class Background:
    """`patient`: the thread gives way to training wherever both want a core. Such a thread is for work that leaves the
    interpreter alone, as copies and checksums do: who holds the interpreter and gets no core holds training up.

    It is a daemon, and lives until `close`: starting one for each piece of work would make training wait for it, and
    waiting for one at the end would keep a process that failed, and whose other ranks are gone.
    """

    def __init__(self, name: str, *, patient: bool = False):
        self._queue: Queue = SimpleQueue()
        threading.Thread(target=_work, args=(self._queue, patient), daemon=True, name=name).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put((work, future))
        return future

    def close(self) -> None:
        """No more work comes."""
        self._queue.put(None)


def _work(queue: Queue, patient: bool) -> None:
    if patient:
        with suppress(OSError):  # on Linux niceness is each thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PATIENT)
    while (found := queue.get()) is not None:
        work, future = found
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del work, future, found  # nothing of it is kept alive by a thread that waits
