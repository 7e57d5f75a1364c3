"""Streams and events that are there on a GPU and nothing on a CPU, so that the same lines serve both."""

from contextlib import AbstractContextManager, nullcontext

import torch


class Stream:
    """A queue of a device's work. On a CPU everything is done when it is said, and so is every wait."""

    def __init__(self, device: torch.device, *, first: bool = False):
        self.stream = torch.cuda.Stream(device, priority=-1 if first else 0) if device.type == "cuda" else None

    def __enter__(self) -> "Stream":
        self.held: AbstractContextManager[object] = torch.cuda.stream(self.stream) if self.stream else nullcontext()
        self.held.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.held.__exit__(*error)  # type: ignore[arg-type]

    def after(self, *moments: "Moment") -> None:
        """What is queued from here on comes after these."""
        for moment in moments:
            if self.stream is not None and moment.event is not None:
                self.stream.wait_event(moment.event)

    def moment(self) -> "Moment":
        return Moment(_record(self.stream) if self.stream else None)

    def keep(self, tensor: torch.Tensor) -> None:
        """The tensor's memory is not given to others before what this stream has queued is done."""
        if self.stream is not None and tensor.is_cuda:
            tensor.record_stream(self.stream)


class Moment:
    """When something queued so far will be done."""

    def __init__(self, event: torch.cuda.Event | None = None):
        self.event = event

    @classmethod
    def here(cls, device: torch.device) -> "Moment":
        """Of the current stream."""
        return cls(_record(torch.cuda.current_stream(device)) if device.type == "cuda" else None)

    def hold_current(self) -> None:
        """The current stream goes on after it."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """The calling thread goes on after it."""
        if self.event is not None:
            self.event.synchronize()


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # a thread that waits sleeps: the cores are for the updates
    event.record(stream)
    return event


DONE = Moment()
