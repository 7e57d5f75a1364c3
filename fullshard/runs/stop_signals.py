"""Signals that ask a run to end."""

import signal
from typing import Self


class Signals:
    """SIGTERM and Ctrl-C ask for an end at the next step boundary; a second Ctrl-C ends at once. Outside the
    `with` they do what they did before."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        self.before = {name: signal.signal(name, self._ask) for name in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for name, handler in self.before.items():
            signal.signal(name, handler)

    def _ask(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
