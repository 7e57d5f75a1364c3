"""Signs of life: what a long piece of work is doing, for a person who waits.

Work says it with `say`; a command shows it inside `shown`. Standard library only.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

PATIENCE = 15.0  # seconds of silence that a log gets; a terminal gets a line at once
_listeners: "list[StatusLine]" = []


def say(text: str) -> None:
    """Tell what is going on now."""
    if _listeners:
        _listeners[-1].show(text)


class StatusLine:
    """One line on stderr. A terminal sees it change. A log gets a line when `PATIENCE` is over, and then one for each stage.

    The stage is the text up to its first digit: "tracing 3 of 42" is the same stage as "tracing 4 of 42".
    """

    def __init__(self, stream: TextIO):
        self.stream, self.live = stream, stream.isatty()
        self.began, self.text, self.printed = time.monotonic(), "", ""
        self.timer = threading.Timer(PATIENCE, self._print)
        self.timer.daemon = True

    def show(self, text: str) -> None:
        self.text = text
        if self.live:
            self._write(f"\r\x1b[K{text} …")
        elif time.monotonic() - self.began >= PATIENCE:
            self._print()

    def close(self) -> None:
        self.timer.cancel()
        if self.live and self.text:
            self._write("\r\x1b[K")

    def _print(self) -> None:
        if not self.live and self.text and _stage(self.text) != self.printed:
            self.printed = _stage(self.text)
            self._write(f"{self.text} …\n")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a full disk, or a stream that was closed
            self.stream.write(text)
            self.stream.flush()


def _stage(text: str) -> str:
    return text[: next((i for i, c in enumerate(text) if c.isdigit()), len(text))]


@contextmanager
def shown(first: str) -> Iterator[None]:
    """Inside, what is said is shown on stderr, `first` to begin with."""
    line = StatusLine(sys.stderr)
    _listeners.append(line)
    line.timer.start()
    line.show(first)
    try:
        yield
    finally:
        _listeners.remove(line)
        line.close()
