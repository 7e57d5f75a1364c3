"""What a person sees while a run goes on: one line on stderr, drawn by rank 0 alone."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from fullshard.base.status import end_stage, tell
from fullshard.base.text import bytes_text, count_text

MINUTE = 60.0  # seconds between lines of a log, at most
WINDOW = 0.5  # seconds of steps that a rate is taken over, at least


class Bar:
    """A progress bar over steps, drawn from the first one on. On other ranks than 0, and where stderr is no terminal, it does not
    draw; then a line is printed every tenth of the way, and every minute."""

    def __init__(self, steps: int, *, visible: bool, unit: str = "tokens"):
        self.console = Console(file=sys.stderr, quiet=not visible)
        self.live = visible and self.console.is_terminal
        self.steps, self.visible, self.unit = steps, visible, unit
        columns = (BarColumn(16), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=not self.live)
        self.task = self.progress.add_task("", total=steps)
        self.updates, self.printed = 0, time.perf_counter()
        self.count, self.seconds, self.rate = 0.0, 0.0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def update(self, index: int, loss: float, count: float, held: int, seconds: float) -> None:
        """After a step: `count` tokens or samples of all ranks, `held` bytes of this one, `seconds` of the step."""
        self._measure(count, seconds)
        rate = f"{count_text(self.rate)} {self.unit}/s  " if self.rate else ""
        text = f"loss {loss:.3f}  {rate}{bytes_text(held)} a rank"
        with suppress(OSError):  # stderr may go to a disk that is full
            if self.updates == 1:
                end_stage()  # what was said until now
                self.progress.start()
            self.progress.update(self.task, completed=index, description=text)
            now = time.perf_counter()
            if self.visible and not self.live and (index % max(1, self.steps // 10) == 0 or now - self.printed >= MINUTE):
                self.printed = now
                self.console.print(f"step {index}/{self.steps}  {text}", highlight=False)

    def _measure(self, count: float, seconds: float) -> None:
        """The rate of whole steps: neither of the first, which compiles and checks, nor of what is done between steps."""
        self.updates += 1
        if self.updates == 1:
            return
        self.count, self.seconds = self.count + count, self.seconds + seconds
        if self.seconds > WINDOW or not self.rate:
            self.rate, self.count, self.seconds = self.count / max(self.seconds, 1e-9), 0.0, 0.0

    def say(self, line: str) -> None:
        """A line above the bar."""
        with suppress(OSError):
            if not self.visible:
                return
            if self.updates:
                self.console.print(line, highlight=False, markup=False, soft_wrap=True)
            else:
                tell(line)


@contextmanager
def counter(*names: str) -> Iterator[Callable[..., None]]:
    """A line that counts up, for work of unknown length; silent where stderr is no terminal."""
    console = Console(file=sys.stderr)
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("")
        yield lambda *counts: bar.update(
            task, description="  ".join(f"{count_text(n)} {name}" for n, name in zip(counts, names, strict=True))
        )
