"""What a person sees while a run goes on: one line on stderr, drawn by rank 0 alone."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from fullshard.text import bytes_text, count_text


class Bar:
    """A progress bar over steps. On other ranks than 0, and where stderr is no terminal, it does not draw;
    then a line is printed every tenth of the way."""

    def __init__(self, steps: int, *, visible: bool, unit: str = "tokens"):
        self.console = Console(file=sys.stderr, quiet=not visible)
        self.live = visible and self.console.is_terminal
        self.steps, self.visible, self.unit = steps, visible, unit
        columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=not self.live)
        self.task = self.progress.add_task("", total=steps)
        self.since, self.count, self.rate = time.perf_counter(), 0.0, 0.0

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def update(self, index: int, loss: float, count: float, held: int) -> None:
        """After a step: `count` tokens or samples of all ranks, `held` bytes of this one."""
        self.count += count
        elapsed = time.perf_counter() - self.since
        if elapsed > 0.5 or index <= 1:
            self.rate, self.since, self.count = self.count / elapsed, time.perf_counter(), 0.0
        text = f"loss {loss:.3f}  {count_text(self.rate)} {self.unit}/s  {bytes_text(held)} a rank"
        with suppress(OSError):  # stderr may go to a disk that is full
            self.progress.update(self.task, completed=index, description=text)
            if self.visible and not self.live and index % max(1, self.steps // 10) == 0:
                self.console.print(f"step {index}/{self.steps}  {text}", highlight=False)

    def say(self, line: str) -> None:
        """A line above the bar."""
        with suppress(OSError):
            if self.visible:
                self.console.print(line, highlight=False, markup=False, soft_wrap=True)


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
