"""Threads that share out large updates: each takes the next call when it is done with its own.

torch would give every thread an equal part and wait for the slowest. Cores that others use as well, as those of most
rented machines, are not equally fast, and one that is away for a moment would hold up all the others.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch


class Batch:
    """Calls that belong together. Whoever ends the last one says so, with the first error if there was one."""

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


class Crew:
    """`size` threads, each of which has torch use so many `cores`."""

    def __init__(self, name: str, size: int, *, cores: int = 1):
        self.cores = cores
        self.calls: SimpleQueue[tuple[Batch, Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self.threads = [threading.Thread(target=self._run, daemon=True, name=f"{name}-{i}") for i in range(size)]
        before, self.begun = torch.get_num_threads(), threading.Barrier(size + 1)
        for thread in self.threads:
            thread.start()
        self.begun.wait()
        torch.set_num_threads(before)  # what was said last holds for every thread that starts later

    def share(
        self, call: Callable[..., None], parts: Sequence[tuple[Any, ...]], end: Callable[[BaseException | None], None]
    ) -> None:
        """Queue `call(*part)` for every part, and `end(error)` after the last."""
        if not parts:
            return end(None)
        batch = Batch(len(parts), end)
        for part in parts:
            self.calls.put((batch, call, part))

    def close(self) -> None:
        """After all that was queued."""
        for _ in self.threads:
            self.calls.put(None)
        for thread in self.threads:
            thread.join()

    def _run(self) -> None:
        torch.get_num_threads()  # else the first call of this thread would set it anew, to what was said last anywhere
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
