"""One thread that does one thing after another beside training, and gives way to it."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

LOWEST = 19  # nice


class Background:
    """A thread for work that nobody waits for. `patient`: it takes a core only where nobody else wants it.

    It is a daemon, and lives until `close`: starting one for each piece of work would make training wait for it, and
    waiting for one at the end would keep a process that failed, and whose other ranks are gone.
    """

    def __init__(self, name: str, *, patient: bool):
        self._queue: SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._queue, patient), daemon=True, name=name).start()

    def start(self, work: Callable[[], None]) -> threading.Event:
        """What is set when the work, which must not raise, is done."""
        done = threading.Event()
        self._queue.put((work, done))
        return done

    def close(self) -> None:
        """No more work comes."""
        self._queue.put(None)


def _work(queue: "SimpleQueue[tuple[Callable[[], None], threading.Event] | None]", patient: bool) -> None:
    if patient:
        _give_way()
    while (found := queue.get()) is not None:
        work, done = found
        try:
            work()
        finally:
            done.set()
        del work, done, found  # nothing of it is kept alive by a thread that waits


def _give_way() -> None:
    """On Linux niceness is each thread's own, and threads that it starts have it too."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
