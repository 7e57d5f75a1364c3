"""What a person sees while a benchmark runs: a bar over its cases on stderr, and a line for each that has ended."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fullshard.base.text import bytes_text, seconds_text
from fullshard.observe.bench.axes import Axis
from fullshard.observe.bench.cases import Case
from fullshard.observe.bench.run_cases import Result


class CaseProgress:
    """A bar where stderr is a terminal, else lines alone."""

    def __init__(self, count: int, axes: Sequence[Axis]):
        self.console, self.axes, self.count = Console(file=sys.stderr), axes, count
        columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=count)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def tell(self, number: int, case: Case, result: Result | None, kept: bool) -> None:
        """Before a case runs, without a result; and after it."""
        label = case.label(self.axes)
        with suppress(OSError):  # stderr may go to a disk that is full
            if result is None:
                self.bar.update(self.task, completed=number - 1, description=label)
                return
            self.bar.update(self.task, completed=number, description=label)
            line = f"case {number}/{self.count}  {label}: {_outcome(result)}" + (", from an earlier run" if kept else "")
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def _outcome(result: Result) -> str:
    if result.outcome != "ok" or not result.seconds:
        return f"{result.outcome}: {result.why}"
    memory = result.measured["memory"]
    peak = memory.get("allocated", memory.get("resident", 0))
    return f"a step {seconds_text(result.seconds)}, {bytes_text(peak)}, {bytes_text(result.measured['sent'])} sent"
