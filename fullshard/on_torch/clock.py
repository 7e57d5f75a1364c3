"""How long the phases of a step took on the device, without making it wait."""

import time

import torch


class Clock:
    """Marks along a step. Reading them waits for the device; setting them does not."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[str, torch.cuda.Event | float]] = []
        self.mark("start")

    def mark(self, phase: str) -> None:
        """`phase` ends here."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """The time in each phase, summed over its parts."""
        totals: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self.marks, self.marks[1:], strict=False):
            totals[phase] = totals.get(phase, 0.0) + _between(before, after)
        return totals


def _between(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    if isinstance(before, float) or isinstance(after, float):
        return float(after) - float(before)  # type: ignore[arg-type]
    after.synchronize()
    return before.elapsed_time(after) / 1000  # ms
