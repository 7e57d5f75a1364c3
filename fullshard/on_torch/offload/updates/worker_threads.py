"""Threads that share the calls of a large update: each takes the next call when it has done its own.

Torch would give every thread an equal part and wait for the slowest. On rented machines cores are not equally fast, and a
core that is busy elsewhere would delay all others.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch


class CallGroup:
    """Calls that belong together. The thread that ends the last one calls `end` with the first error, or None."""

    def __init__(self, count: int, end: Callable[[BaseException | None], None]):
        self.left, self.end, self.lock = count, end, threading.Lock()
        self.error: BaseException | None = None

    def done(self, error: BaseException | None) -> None:
        with self.lock:
            self.left -= 1
            self.error = self.error or error
            last = self.left == 0
        if last:
            self.end(self.error)


class WorkerThreads:
    """`size` threads; torch uses so many `cores` in each."""

    def __init__(self, name: str, size: int, *, cores: int = 1):
        self.cores = cores
        self.calls: SimpleQueue[tuple[CallGroup, Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self.threads = [threading.Thread(target=self._run, daemon=True, name=f"{name}-{i}") for i in range(size)]
        before, self.begun = torch.get_num_threads(), threading.Barrier(size + 1)
        for thread in self.threads:
            thread.start()
        self.begun.wait()
        torch.set_num_threads(before)  # else the last value would hold for every thread that starts later

    def share(
        self, call: Callable[..., None], parts: Sequence[tuple[Any, ...]], end: Callable[[BaseException | None], None]
    ) -> None:
        """Queue `call(*part)` for every part, and `end(error)` after the last."""
        if not parts:
            return end(None)
        batch = CallGroup(len(parts), end)
        for part in parts:
            self.calls.put((batch, call, part))

    def close(self) -> None:
        """End the threads after all queued calls."""
        for _ in self.threads:
            self.calls.put(None)
        for thread in self.threads:
            thread.join()

    def _run(self) -> None:
        torch.get_num_threads()  # else the first call of this thread would set it to the last value of any thread
        torch.set_num_threads(self.cores)
        self.begun.wait()
        with torch.no_grad():
            while (given := self.calls.get()) is not None:
                batch, call, part = given
                batch.done(_error_of(call, part))


def _error_of(call: Callable[..., None], part: tuple[Any, ...]) -> BaseException | None:
    try:
        call(*part)
    except BaseException as error:
        return error
    return None
