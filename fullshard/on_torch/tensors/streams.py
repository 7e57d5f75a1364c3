"""CUDA streams and events. On a CPU they are empty, and everything is done at once: the same code serves both."""

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch


class DeviceStream:
    """A queue of a device's work."""

    def __init__(self, device: torch.device, *, first: bool = False):
        self.stream = torch.cuda.Stream(device, priority=-1 if first else 0) if device.type == "cuda" else None

    def __enter__(self) -> "DeviceStream":
        self.held: AbstractContextManager[object] = torch.cuda.stream(self.stream) if self.stream else nullcontext()
        self.held.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.held.__exit__(*error)  # type: ignore[arg-type]

    def after(self, *events: "StreamEvent") -> None:
        """Work that is queued from here on waits for these events."""
        for event in events:
            if self.stream is not None and event.cuda is not None:
                self.stream.wait_event(event.cuda)

    def record(self) -> "StreamEvent":
        """The event that all work queued so far is done."""
        return StreamEvent(_record(self.stream) if self.stream else None)

    def keep(self, tensor: torch.Tensor) -> None:
        """The allocator reuses the tensor's memory only after the work that this stream has queued."""
        if self.stream is not None and tensor.is_cuda:
            tensor.record_stream(self.stream)


class StreamEvent:
    """A point in a stream's work. `cuda` is None where there is nothing to wait for."""

    def __init__(self, cuda: torch.cuda.Event | None = None):
        self.cuda = cuda

    @classmethod
    def here(cls, device: torch.device) -> "StreamEvent":
        """Of the current stream."""
        return cls(_record(torch.cuda.current_stream(device)) if device.type == "cuda" else None)

    def hold_current(self) -> None:
        """Work that the current stream queues from here on waits for this event."""
        if self.cuda is not None:
            torch.cuda.current_stream().wait_event(self.cuda)

    def done(self) -> bool:
        return self.cuda is None or self.cuda.query()

    def wait(self) -> None:
        """Block the calling thread."""
        if self.cuda is not None:
            self.cuda.synchronize()


AHEAD = 3  # gathers that the host queues before the device has done them: enough to keep it busy


class GatherPace:
    """The host queues at most AHEAD gathers ahead of the device. If the queue of launches is full, the call that waits for room
    keeps the lanes' calls out as well."""

    def __init__(self, device: torch.device):
        self.device, self.queued = device, deque[StreamEvent](maxlen=AHEAD)

    def wait(self) -> None:
        """Before a gather."""
        if len(self.queued) == AHEAD:
            self.queued[0].wait()
        self.queued.append(StreamEvent.here(self.device))


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps: the cores are for the updates
    event.record(stream)
    return event


DONE = StreamEvent()
