"""The bus between device and host, as the lanes share it: one queue for each direction, and never a long one."""

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.on_torch.offload.events import Moment, Stream

FLYING = 2  # copies of pieces under way in one direction


class Wire:
    """One direction of the bus, for both lanes. A copy engine serves what is queued before it looks at another stream, so
    there is one queue, it never holds more than two copies, and none that would have to wait."""

    def __init__(self, device: torch.device):
        self.stream = Stream(device)
        self.turn = threading.Lock()
        self.flying: deque[Moment] = deque()

    def send(self, targets: list[Tensor], sources: list[Tensor], *after: Moment) -> Moment:
        """Copy, once it is `after`; the calling thread waits until it is queued."""
        for moment in after:
            moment.wait()
        with self.turn:
            if len(self.flying) == FLYING:
                self.flying.popleft().wait()
            with self.stream:
                if targets:
                    torch._foreach_copy_(targets, sources, non_blocking=True)
                self.flying.append(self.stream.moment())
            return self.flying[-1]


@dataclass
class Bus:
    """Both directions, and the bytes that the lanes have sent, since the start."""

    up: Wire
    down: Wire
    moved_up: int = 0
    moved_down: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "Bus":
        return cls(Wire(device), Wire(device))
