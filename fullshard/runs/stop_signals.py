"""Signals that ask a run to end."""

import os
import signal
from typing import Self

from fullshard.base.errors import SAVED_TO_GO_ON

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Signals:
    """SIGTERM, Ctrl-C and SIGUSR1 ask for an end at the next step boundary; a second Ctrl-C ends at once. Outside the
    `with` they do what they did before. `first`: the signal that came first, or 0."""

    def __init__(self) -> None:
        self.first = 0

    @property
    def asked(self) -> bool:
        return self.first != 0

    def __enter__(self) -> Self:
        self.before = {name: signal.signal(name, self._ask) for name in ASKING}
        return self

    def __exit__(self, *error: object) -> None:
        for name, handler in self.before.items():
            signal.signal(name, handler)

    def _ask(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.first = self.first or number


def end_early_on_sigusr1() -> None:
    """Before a run's first step, when nothing can be saved, SIGUSR1 ends this process with the code of a run that goes on."""
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(SAVED_TO_GO_ON))


def ignore_signals() -> None:
    """For the last moments of a run that was stopped: launchers end all ranks once the first is gone, and none shall lose its
    exit code."""
    for name in ASKING:
        signal.signal(name, signal.SIG_IGN)
