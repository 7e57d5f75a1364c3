"""Timing of the phases of a step on the device, without synchronising with it."""

import time
from collections.abc import Callable

import torch

listeners: list[Callable[[str], None]] = []  # called at every mark with the phase that ended: a profiler, while it runs


class Clock:
    """Time marks in a step. Setting a mark does not wait for the device; reading the times does."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[str, torch.cuda.Event | float]] = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        """Mark the end of `phase`."""
        for hear in listeners:
            hear(phase)
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """The seconds in each phase, summed over all its parts."""
        totals: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self.marks, self.marks[1:], strict=False):
            totals[phase] = totals.get(phase, 0.0) + _between(before, after)
        return totals


def _between(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    if isinstance(before, float) or isinstance(after, float):
        return float(after) - float(before)  # type: ignore[arg-type]
    after.synchronize()
    return before.elapsed_time(after) / 1000  # ms
