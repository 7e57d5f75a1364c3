"""Copies between device and host, for both lanes: one short queue for each direction."""

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.on_torch.tensors.streams import DeviceStream, StreamEvent

IN_FLIGHT = 2  # copies of pieces that are queued in one direction


class CopyQueue:
    """One direction. A copy engine does all queued copies of a stream before it looks at another stream. So there is one
    stream, it holds at most two copies, and none that would have to wait."""

    def __init__(self, device: torch.device):
        self.stream = DeviceStream(device)
        self.turn = threading.Lock()
        self.in_flight: deque[StreamEvent] = deque()

    def send(self, targets: list[Tensor], sources: list[Tensor], *after: StreamEvent) -> StreamEvent:
        """Queue a copy after these events; the calling thread waits until it is queued."""
        for event in after:
            event.wait()
        with self.turn:
            if len(self.in_flight) == IN_FLIGHT:
                self.in_flight.popleft().wait()
            with self.stream:
                if targets:
                    torch._foreach_copy_(targets, sources, non_blocking=True)
                self.in_flight.append(self.stream.record())
            return self.in_flight[-1]


@dataclass
class CopyQueues:
    """Both directions, and the bytes that were copied since the start."""

    up: CopyQueue
    down: CopyQueue
    moved_up: int = 0
    moved_down: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "CopyQueues":
        return cls(CopyQueue(device), CopyQueue(device))
