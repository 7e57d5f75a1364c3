"""The copies of a save that are still under way, and their checksum."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import xxhash

from fullshard.on_torch.tensors.streams import DONE, StreamEvent


class PendingCopies:
    """Copies of the state's items into the file image. `done` is set when all are made.

    Copies from a GPU are queued on a stream and complete at `event`. On a CPU, `copies` are functions that two threads
    call: the background thread in `finish`, and the thread that wants to change the state in `wait`. The background thread
    has low priority, so `wait` makes the remaining copies itself instead of waiting for it.

    `parts[i]` is the memory that copy i fills, in the file's order. Their checksum is computed right after each copy,
    while the bytes are in the core's cache.
    """

    error: Exception | None

    def __init__(self, event: StreamEvent = DONE, copies: Iterable[Callable[[], None]] = (), parts: Sequence[memoryview] = ()):
        self.event, self.queue, self.parts, self.done = event, deque(enumerate(copies)), parts, threading.Event()
        self.lock, self.unfinished, self.error = threading.Lock(), len(self.queue), None
        self.copied = [False] * self.unfinished

    def finish(self) -> str | None:
        """Make or wait for all copies; return the checksum of `parts`, or None without any. Called once, before writing."""
        checksum, self.parts = OrderedChecksum(self.parts), ()  # a caller that keeps this object keeps no memory with it
        while self._copy_next():
            checksum.update(self.copied)
        self.event.wait()
        if not self.unfinished:
            self.done.set()
        self.done.wait()
        if self.error is not None:
            raise self.error
        checksum.update(self.copied)
        return checksum.digest.hexdigest() if checksum.count else None

    def wait(self) -> None:
        """Order whatever the current stream, or this thread, does next after the copies."""
        self.event.hold_current()
        if self.unfinished:
            while self._copy_next():
                pass
            self.done.wait()

    def _copy_next(self) -> bool:
        """Make the next copy that no thread has begun. False if there is none."""
        try:
            i, copy = self.queue.popleft()
        except IndexError:
            return False
        try:
            copy()
        except Exception as error:
            self.error = error
        with self.lock:
            self.unfinished -= 1
            self.copied[i] = True
            last = not self.unfinished
        if last:
            self.done.set()
        return True


class OrderedChecksum:
    """The checksum of consecutive parts that become ready in any order."""

    def __init__(self, parts: Sequence[memoryview]):
        self.queue, self.count, self.digest = deque(enumerate(parts)), len(parts), xxhash.xxh3_128()

    def update(self, ready: Sequence[bool]) -> None:
        """Add the next parts, up to the first that is not ready."""
        while self.queue and ready[self.queue[0][0]]:
            self.digest.update(self.queue.popleft()[1])
