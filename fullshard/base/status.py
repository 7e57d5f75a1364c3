"""Signs of life: what a long piece of work is doing, for a person who waits.

Work says it with `say`; a command shows it inside `shown`, or inside `phases` with the seconds of each. Standard library only.
"""

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

PATIENCE = 15.0  # seconds of silence that a log gets; a terminal gets a line at once
PROMPT = 1.0  # the same inside `phases`
BRIEF = 0.1  # seconds: a shorter phase gets no line of its own
ERASE = "\r\x1b[K"  # a terminal's line

_listeners: list["StatusLine"] = []


def say(text: str) -> None:
    """Tell what is going on now."""
    if _listeners:
        _listeners[-1].show(text)


def end_stage() -> None:
    """What was said last is done, and something else draws now."""
    if _listeners:
        _listeners[-1].end_stage()


def tell(line: str) -> None:
    """Print a line that stays on stderr, above what is shown."""
    if _listeners:
        _listeners[-1].above(line)
        return
    with suppress(OSError, ValueError):  # a full disk, or a stream that was closed
        print(line, file=sys.stderr, flush=True)


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
            self._draw()
        elif time.monotonic() - self.began >= PATIENCE:
            self._print()

    def above(self, line: str) -> None:
        """Print a line that stays."""
        self._write(f"{ERASE if self.live else ''}{line}\n")
        if self.live and self.text:
            self._draw()

    def end_stage(self) -> None:
        """What was said last is done."""
        if self.live and self.text:
            self._write(ERASE)
        self.text = ""

    def close(self) -> None:
        self.timer.cancel()
        self.end_stage()

    def _draw(self, more: str = "") -> None:
        width = shutil.get_terminal_size().columns - 1  # a longer line would wrap, and not be erased
        self._write(ERASE + f"{self.text} …{more}"[:width])

    def _print(self) -> None:
        if not self.live and self.text and _stage(self.text) != self.printed:
            self.printed = _stage(self.text)
            self._write(f"{self.text} …\n")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self.stream.write(text)
            self.stream.flush()


class PhaseLine(StatusLine):
    """The phases of a start, each with its seconds when it is over.

    Meanwhile a terminal sees the phase with its seconds so far, and a log gets a line once it has taken `PROMPT`. `began`: when
    the first phase began. `announced`: a line about it has been printed.
    """

    def __init__(self, stream: TextIO, began: float, *, announced: bool = False):
        super().__init__(stream)
        self.began, self.announced = began, announced
        self.lock, self.ended = threading.RLock(), threading.Event()
        self.ticker = threading.Thread(target=self._tick, name="phases", daemon=True)
        self.ticker.start()

    def show(self, text: str) -> None:
        with self.lock:
            if self.text and _stage(text) != _stage(self.text):
                self.end_stage()
            self.text = text
            if self.live:
                self._draw_seconds()

    def end_stage(self) -> None:
        with self.lock:
            text, seconds = self.text, time.monotonic() - self.began
            super().end_stage()
            if text and seconds >= BRIEF:
                self.above(f"{text}: {seconds:.1f} s")
            self.began, self.announced = time.monotonic(), False

    def above(self, line: str) -> None:
        with self.lock:
            super().above(line)

    def abandon(self) -> None:
        """The phase did not come to its end."""
        self.ended.set()
        with self.lock:
            super().end_stage()

    def close(self) -> None:
        self.end_stage()
        self.abandon()

    def _tick(self) -> None:
        while not self.ended.wait(PROMPT / 2):
            with self.lock:
                if self.text and self.live:
                    self._draw_seconds()
                elif self.text and not self.announced and time.monotonic() - self.began >= PROMPT:
                    self.announced = True
                    self.above(f"{self.text} …")

    def _draw_seconds(self) -> None:
        seconds = time.monotonic() - self.began
        self._draw(f" {seconds:.0f} s" if seconds >= PROMPT else "")


def _stage(text: str) -> str:
    return text[: next((i for i, c in enumerate(text) if c.isdigit()), len(text))]


@contextmanager
def _listening(listener: "StatusLine") -> Iterator[None]:
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def shown(first: str) -> Iterator[None]:
    """Inside, what is said is shown on stderr, `first` to begin with."""
    line = StatusLine(sys.stderr)
    line.timer.start()
    with _listening(line):
        line.show(first)
        try:
            yield
        finally:
            line.close()


@contextmanager
def phases(first: str, seconds: float = 0.0, *, announced: bool = False) -> Iterator[None]:
    """Inside, what is said is shown on stderr as phases with their seconds: first `first`, which has lasted `seconds` already.
    `announced`: a line about it has been printed."""
    line = PhaseLine(sys.stderr, time.monotonic() - seconds, announced=announced)
    with _listening(line):
        line.show(first)
        try:
            yield
        except BaseException:
            line.abandon()
            raise
        line.close()


@contextmanager
def unsaid() -> Iterator[None]:
    """Inside, nothing is shown of what is said: it is part of a larger phase."""
    before = _listeners[:]
    _listeners.clear()
    try:
        yield
    finally:
        _listeners[:] = before
