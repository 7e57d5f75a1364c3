"""One unit's update in one step: its gradients, when they are there, and when the new parameters are."""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullshard.on_torch.offload.events import DONE, Moment, Stream
from fullshard.on_torch.offload.units import Away, Piece


class Go:
    """Whether this step's updates happen, and the factors on all gradients; known only late in a step."""

    def __init__(self) -> None:
        self.known = threading.Event()
        self.scale: Tensor | None = None  # the factors, on the device
        self.numbers: Tensor | None = None  # on the host: skip, factors
        self.moment = DONE
        self.answer: tuple[list[float], bool] | None = None  # what `wait` returns, once somebody has waited

    def say(self, factors: list[Tensor], skip: Tensor, device: torch.device) -> None:
        """Queue the news; nobody waits here."""
        self.scale = torch.stack([f.reshape(()).float() for f in factors]) if factors else None
        found = torch.stack([t.double().reshape(()) for t in (skip, *factors)])
        self.numbers = found.to("cpu", non_blocking=True)  # pinned, from torch's cache: a few bytes
        self.moment = Moment.here(device)
        self.known.set()

    def drop(self) -> None:
        """The step was given up: no update happens."""
        if not self.known.is_set():
            self.numbers = torch.ones(1)
            self.known.set()

    def wait(self) -> tuple[list[float], bool]:
        if self.answer is None:
            self.known.wait()
            self.moment.wait()
            assert self.numbers is not None
            skip, *factors = self.numbers.tolist()
            self.answer = factors, bool(skip)
        return self.answer


@dataclass
class Job:
    """One unit's update in one step."""

    away: Away
    go: Go
    gradients: list[Tensor | None] = field(default_factory=list)
    ready: Moment = DONE  # the gradients are there
    there: bool = False  # and that has been seen
    groups: list[dict[str, Any]] = field(default_factory=list)  # the optimizer's settings, by parameter
    steps: list[int] = field(default_factory=list)  # the number of this update, by parameter
    drained: dict[int, tuple[Tensor, Moment]] = field(default_factory=dict)  # gradients on the host already, by piece
    moments: list[Moment] = field(default_factory=list)  # when the parameters of each piece are new
    issued: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    had: list[bool] = field(default_factory=list)  # whether there was a gradient, by parameter
    counted: bool = False
    readers: tuple[Stream, ...] = ()  # that the gradients are read on
    wide: bool = False  # gradients come in the master's dtype: a step of the caller's own
    unread: int = 0  # pieces whose gradients are to be read from the device
    dropped: threading.Event = field(default_factory=threading.Event)  # the gradients, after the last was queued to be read
    free: list[Moment] = field(default_factory=list)  # when their memory is there for others

    def arrived(self) -> bool:
        """Whether the gradients are there. The device is asked until it says so once: to ask it lets go of the interpreter,
        which others then have to give back."""
        self.there = self.there or self.ready.done()
        return self.there

    def issue(self, moment: Moment) -> None:
        """One more piece is queued. After the last, the gradients are let go, if they were not before."""
        with self.lock:
            self.moments.append(moment)
            if len(self.moments) == len(self.away.pieces):
                self._drop()
                self.drained = {}
                self.issued.set()

    def keep(self, *readers: Stream) -> None:
        """FSDP may not have the gradients' memory, one storage for all of a unit's, before these have read it."""
        self.readers, self.unread = readers, len(self.away.pieces) - len(self.drained)
        for g in {g.untyped_storage().data_ptr(): g for g in self.gradients if g is not None}.values():
            for reader in readers:
                reader.keep(g)

    def read(self) -> None:
        """One more piece's gradients are queued to be read. After the last, they are let go."""
        with self.lock:
            self.unread -= 1
            if self.unread == 0:
                self._drop()

    def _drop(self) -> None:
        """The allocator has the memory when the streams that it was kept for are where they are now."""
        if not self.dropped.is_set():
            self.gradients = []
            self.free = [stream.moment() for stream in self.readers]
            self.dropped.set()

    def let_go(self) -> bool:
        """Whether the gradients' memory is there for others."""
        return self.dropped.is_set() and all(moment.done() for moment in self.free)

    def wait_let_go(self) -> None:
        self.dropped.wait()
        for moment in self.free:
            moment.wait()

    def copies(self, piece: Piece, parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What takes the piece's gradients to `parts`, a segment each: targets and sources."""
        targets, sources = [], []
        for s, part in zip(piece.segments, parts, strict=True):
            gradient = self.gradients[s.parameter]
            if gradient is not None:
                targets.append(part)
                sources.append(gradient if s.whole else gradient.view(-1)[s.start : s.stop])
        return targets, sources

    def collect(self, piece: Piece, parts: list[Tensor]) -> None:
        """The piece's gradients to `parts`; queued on the current stream."""
        targets, sources = self.copies(piece, parts)
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def runs(self, piece: Piece) -> list[tuple[int, int, int]]:
        """(start, stop, parameter) of what is updated alike: neighbours of one group with equally many updates."""
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
