"""Profiles the steps of a run that its recipe's `profile` names. In all other steps it does nothing."""

from collections.abc import Callable
from pathlib import Path

from fullshard.base.errors import FullshardError
from fullshard.engine.machine import StepProfiler
from fullshard.engine.trainer import RunState
from fullshard.runs.prepare.prepare import Prepared

Reporter = Callable[[Prepared, Path], str]  # writes a profile's report from the files of all ranks; the end of a sentence


class Profiling:
    """The profile of one run on this rank. `say`: prints a line. `reporter`: None leaves the traces as they are."""

    def __init__(
        self, prepared: Prepared, state: RunState, directory: Path, say: Callable[[str], None], reporter: Reporter | None = None
    ):
        self.prepared, self.state, self.say, self.reporter = prepared, state, say, reporter
        wanted = prepared.recipe.profile
        self.first, self.last = wanted.at, wanted.at + wanted.steps - 1
        self.directory = directory / "profile" / f"step-{wanted.at}"
        self.profiler: StepProfiler | None = None
        self.done = False
        if self.first and state.step >= self.first:
            say(f"profile.at = {self.first} has no effect: the run goes on after step {state.step}")

    def begin(self, step: int) -> None:
        """A step begins: its data is asked for."""
        if step == self.first and not self.done:
            self.profiler = self.prepared.engine.machine.profiler(self.state)
        if self.profiler:
            self.profiler.begin(step)

    def data_here(self) -> None:
        if self.profiler:
            self.profiler.data_here()

    def end(self) -> None:
        """The step's numbers are there."""
        if self.profiler:
            self.profiler.end()

    def finish(self, step: int) -> None:
        """After the last profiled step write its files, on all ranks together. A failure does not end the run."""
        profiler = self.profiler
        if profiler is None or step < self.last:
            return
        self.profiler, self.done = None, True
        try:
            self.prepared.engine.ranks.agreement().all_or_none(lambda: profiler.write(self.directory))
            self.prepared.engine.ranks.agreement().first_decides(self._report)
        except (FullshardError, OSError) as error:
            self.say(f"the profile of step {self.first} was not written: {error}")

    def _report(self) -> None:
        self.say(f"profile: {self.reporter(self.prepared, self.directory) if self.reporter else self.directory}")
