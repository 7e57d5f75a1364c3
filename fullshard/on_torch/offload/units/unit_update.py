"""One unit's update in one step: its gradients, and the events of its pieces."""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit, Piece
from fullshard.on_torch.tensors.shard_ranges import local
from fullshard.on_torch.tensors.streams import DONE, DeviceStream, StreamEvent


class StepDecision:
    """Whether this step's updates happen, and the factors on all gradients. Known late in a step."""

    def __init__(self) -> None:
        self.known = threading.Event()
        self.scale: Tensor | None = None  # the factors, on the device
        self.numbers: Tensor | None = None  # on the host: skip, factors
        self.event = DONE
        self.answer: tuple[list[float], bool] | None = None  # of `wait`, kept after the first call

    def announce(self, factors: list[Tensor], skip: Tensor, device: torch.device) -> None:
        """Queue the copy of both to the host; does not wait."""
        self.scale = torch.stack([f.reshape(()).float() for f in factors]) if factors else None
        found = torch.stack([t.double().reshape(()) for t in (skip, *factors)])
        self.numbers = found.to("cpu", non_blocking=True)  # pinned, from torch's cache: a few bytes
        self.event = StreamEvent.here(device)
        self.known.set()

    def cancel(self) -> None:
        """The step was given up: no update happens."""
        if not self.known.is_set():
            self.numbers = torch.ones(1)
            self.known.set()

    def wait(self) -> tuple[list[float], bool]:
        if self.answer is None:
            self.known.wait()
            self.event.wait()
            assert self.numbers is not None
            skip, *factors = self.numbers.tolist()
            self.answer = factors, bool(skip)
        return self.answer


@dataclass
class UnitUpdate:
    """One unit's update in one step."""

    unit: OffloadedUnit
    decision: StepDecision
    gradients: list[Tensor | None] = field(default_factory=list)
    ready: StreamEvent = DONE  # the gradients are there
    there: bool = False  # `ready` was seen to be done
    groups: list[dict[str, Any]] = field(default_factory=list)  # the optimizer's settings, by parameter
    steps: list[int] = field(default_factory=list)  # the number of this update, by parameter
    on_host: dict[int, tuple[Tensor, StreamEvent]] = field(default_factory=dict)  # gradients on the host already, by piece
    events: list[StreamEvent] = field(default_factory=list)  # the new parameters of each piece are there
    issued: threading.Event = field(default_factory=threading.Event)  # all pieces are queued
    lock: threading.Lock = field(default_factory=threading.Lock)
    had: list[bool] = field(default_factory=list)  # a gradient, by parameter
    counted: bool = False
    readers: tuple[DeviceStream, ...] = ()  # on which the gradients are read
    wide: bool = False  # gradients have the master's dtype: a step of the caller's own
    unread: int = 0  # pieces whose gradients are still to be read from the device
    dropped: threading.Event = field(default_factory=threading.Event)  # the last read of the gradients is queued
    free: list[StreamEvent] = field(default_factory=list)  # their memory can be used again

    def __post_init__(self) -> None:
        if not self.unit.pieces:
            self.issued.set()

    def arrived(self) -> bool:
        """True if the gradients are there. Then the device is not asked again: a query releases the interpreter lock."""
        self.there = self.there or self.ready.done()
        return self.there

    def issue(self, event: StreamEvent) -> None:
        """One more piece is queued. After the last, the gradients are released."""
        with self.lock:
            self.events.append(event)
            if len(self.events) == len(self.unit.pieces):
                self._drop()
                self.on_host = {}
                self.issued.set()

    def take(self, groups: list[dict[str, Any]], device: torch.device) -> None:
        """Take the gradients from the parameters; they are there when the current stream is. `groups`: the settings, by
        parameter."""
        params = self.unit.params[: self.unit.trained]
        self.gradients = [local(p.grad).contiguous() if p.grad is not None else None for p in params]
        self.had, self.ready = [g is not None for g in self.gradients], StreamEvent.here(device)
        self.groups, self.steps = groups, [step + 1 for step in self.unit.steps]
        for p in params:
            p.grad = None

    def forget(self) -> None:
        """Have no gradients at all: the step was given up."""
        self.gradients, self.had, self.on_host = [None] * self.unit.trained, [False] * self.unit.trained, {}

    def drop(self, parameters: set[int]) -> None:
        """Have no gradients of these parameters, by `id`. Before any piece is updated."""
        for i, p in enumerate(self.unit.params[: self.unit.trained]):
            if id(p) in parameters:
                self.gradients[i], self.had[i], self.on_host = None, False, {}

    def keep(self, *readers: DeviceStream) -> None:
        """Keep the gradients' memory, one storage for a whole unit, until these streams have read it: see *Who frees gradients*
        in `tiered_optimizer`."""
        self.readers, self.unread = readers, len(self.unit.pieces) - len(self.on_host)
        for g in {g.untyped_storage().data_ptr(): g for g in self.gradients if g is not None}.values():
            for reader in readers:
                reader.keep(g)

    def read(self) -> None:
        """The read of one more piece's gradients is queued. After the last, the gradients are released."""
        with self.lock:
            self.unread -= 1
            if self.unread == 0:
                self._drop()

    def _drop(self) -> None:
        """The allocator has the memory when the readers have done the work that they have queued now."""
        if not self.dropped.is_set():
            self.gradients = []
            self.free = [stream.record() for stream in self.readers]
            self.dropped.set()

    def released(self) -> bool:
        """True if the gradients' memory can be used again."""
        return self.dropped.is_set() and all(event.done() for event in self.free)

    def wait_released(self) -> None:
        self.dropped.wait()
        for event in self.free:
            event.wait()

    def gradient_copies(self, piece: Piece, parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Targets and sources of the copies of a piece's gradients to `parts`, one for each segment."""
        targets, sources = [], []
        for s, part in zip(piece.segments, parts, strict=True):
            gradient = self.gradients[s.parameter]
            if gradient is not None:
                targets.append(part)
                sources.append(gradient if s.whole else gradient.view(-1)[s.start : s.stop])
        return targets, sources

    def collect(self, piece: Piece, parts: list[Tensor]) -> None:
        """Copy the piece's gradients to `parts`, on the current stream."""
        targets, sources = self.gradient_copies(piece, parts)
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def runs(self, piece: Piece) -> list[tuple[int, int, int]]:
        """(start, stop, parameter) of what one call updates: neighbours in one group with equal step counts."""
        found: list[tuple[int, int, int]] = []
        for s in piece.segments:
            if not self.had[s.parameter]:
                continue
            stop = s.offset + s.stop - s.start
            if found and found[-1][1] == s.offset and self._alike(found[-1][2], s.parameter):
                found[-1] = (found[-1][0], stop, s.parameter)
            else:
                found.append((s.offset, stop, s.parameter))
        return found

    def _alike(self, a: int, b: int) -> bool:
        return self.groups[a] is self.groups[b] and self.steps[a] == self.steps[b]
