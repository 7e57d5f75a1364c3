"""The fixed memory that pieces pass on their way: slots of the device for state, trays of the host for gradients and new
parameters, and a bench to update on. Made once; who may use which, and when, is in `streamed` and `cores`.
"""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fullshard.on_torch.offload.events import DONE, Moment
from fullshard.on_torch.offload.stores.packing import halves
from fullshard.on_torch.offload.units import Piece
from fullshard.storage.host import Arena


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Slot:
    """Staging memory of the device for one piece's state; free again after `free`."""

    state: list[Tensor]
    free: Moment = DONE
    filled: Moment = DONE
    idle: threading.Event = field(default_factory=_set)  # what it holds is queued to go back
    views: dict[int, list[Tensor]] = field(default_factory=dict)  # by piece
    words: dict[int, list[tuple[Tensor, list[Tensor]]]] = field(default_factory=dict)  # the same for the kernel, by segment

    def of(self, piece: Piece) -> list[Tensor]:
        """As the piece rests."""
        if piece.number not in self.views:
            first, *moments = self.state
            moments = [t[: piece.elements] for t in moments]
            if piece.paired:
                low, rounded = halves(first[: piece.elements])
                self.views[piece.number] = [low, *moments, rounded]
            else:
                first = first.view(torch.int16) if piece.packed else first
                self.views[piece.number] = [first[: piece.elements], *moments]
        return self.views[piece.number]


@dataclass
class Gradients:
    """Memory for the gradients of one piece."""

    memory: Tensor
    views: dict[int, list[Tensor]] = field(default_factory=dict)  # by piece

    def of(self, piece: Piece) -> list[Tensor]:
        """By segment."""
        if piece.number not in self.views:
            self.views[piece.number] = segment_views(self.memory, piece)
        return self.views[piece.number]


@dataclass
class Bench:
    """Memory of the device that one piece after the other is updated in."""

    gradients: Gradients
    master: Tensor | None  # where pieces come packed
    rounded: Tensor | None  # the parameters, where pieces come packed without them, or go on to the host


@dataclass
class Tray:
    """Memory of the host for one piece that the cores update: its gradients come to it, its new parameters go from it."""

    gradients: Gradients
    rounded: Tensor | None  # None: they rest on the host
    filled: Moment = DONE
    sent: Moment = DONE
    idle: threading.Event = field(default_factory=_set)  # no core works in it, and what it holds is queued to be sent
    wide: Gradients | None = None  # in the master's dtype, for steps of the caller's own, where `gradients` are narrower
    arena: Arena | None = None  # what `wide` was taken from: it is unpinned when it goes

    def of(self, *, wide: bool) -> Gradients:
        return self.wide if wide and self.wide is not None else self.gradients


def segment_views(memory: Tensor, piece: Piece, *, flat: bool = False) -> list[Tensor]:
    """A piece's segments in flat memory; whole parameters in their own shape, so that gradients are copied as they come."""
    found = [memory[s.offset : s.offset + s.stop - s.start] for s in piece.segments]
    if flat:
        return found
    return [part.view(s.shape) if s.whole else part for part, s in zip(found, piece.segments, strict=True)]
