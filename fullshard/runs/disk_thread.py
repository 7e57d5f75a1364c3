"""A thread for calls that may never return, because a file system does not answer. Standard library only."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress


class DiskThread:
    """Carries out one call at a time. No method waits for the call, except `wait`, and that not for long."""

    def __init__(self) -> None:
        self.call: Callable[[], object] | None = None
        self.began, self.closed = 0.0, False
        self.changed = threading.Condition()  # held for moments only, never during a call
        threading.Thread(target=self._run, daemon=True, name="disk").start()

    def do(self, call: Callable[[], object]) -> bool:
        """Begin a call; False if the one before it is not over. What it raises is lost."""
        with self.changed:
            if self.call is not None:
                return False
            self.call, self.began = call, time.monotonic()
            self.changed.notify_all()
            return True

    def taken(self) -> float:
        """Seconds that the call under way has taken so far; 0 without one."""
        with self.changed:
            return time.monotonic() - self.began if self.call else 0.0

    def wait(self, seconds: float) -> bool:
        """Whether the call is over in this time."""
        with self.changed:
            return self.changed.wait_for(lambda: self.call is None, seconds)

    def close(self) -> None:
        """Let the thread end, once its call is over."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            with suppress(Exception):  # who only asks whether there is an answer has one
                call()
            with self.changed:
                self.call = None
                self.changed.notify_all()

    def _next(self) -> Callable[[], object] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.call is not None or self.closed)
            return self.call
