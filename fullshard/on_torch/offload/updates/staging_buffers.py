"""Fixed memory that pieces pass during an update: staging slots and a workspace on the device, buffers on the host.

Made once. `gpu_lane` and `cpu_lane` decide which piece uses which.
"""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fullshard.on_torch.offload.units.offloaded_unit import Piece
from fullshard.on_torch.optimizers.moment_codes import MomentFormat
from fullshard.on_torch.optimizers.packed_masters import halves
from fullshard.on_torch.tensors.streams import DONE, StreamEvent
from fullshard.storage.pinned_arena import Arena


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class StagingSlot:
    """Device memory for one piece's state. It can be filled again after `free`."""

    state: list[Tensor]
    moments: MomentFormat
    free: StreamEvent = DONE
    filled: StreamEvent = DONE
    idle: threading.Event = field(default_factory=_set)  # the copy of its contents to the host is queued
    views: dict[int, list[Tensor]] = field(default_factory=dict)  # by piece
    words: dict[int, list[tuple[Tensor, list[Tensor]]]] = field(
        default_factory=dict
    )  # the same as the Triton kernel takes it, by segment

    def of(self, piece: Piece) -> list[Tensor]:
        """Its memory in the form in which the piece is stored."""
        if piece.number not in self.views:
            first, *moments = self.state
            moments = [self.moments.part(t, 0, piece.elements) for t in moments]
            if piece.paired:
                low, rounded = halves(first[: piece.elements])
                self.views[piece.number] = [low, *moments, rounded]
            else:
                first = first.view(torch.int16) if piece.packed else first
                self.views[piece.number] = [first[: piece.elements], *moments]
        return self.views[piece.number]


@dataclass
class GradientBuffer:
    """Memory for the gradients of one piece."""

    memory: Tensor
    views: dict[int, list[Tensor]] = field(default_factory=dict)  # by piece

    def of(self, piece: Piece) -> list[Tensor]:
        """By segment."""
        if piece.number not in self.views:
            self.views[piece.number] = piece.segment_views(self.memory)
        return self.views[piece.number]


@dataclass
class Workspace:
    """Device memory that pieces are updated in, one after the other."""

    gradients: GradientBuffer
    master: Tensor | None  # unpacked, if pieces are packed
    rounded: Tensor | None  # parameters in the compute dtype; see `offload_bytes.StagingLayout`


@dataclass
class CpuBuffer:
    """Host memory for one piece of the CPU lane: its gradients, and its new parameters until they are sent."""

    gradients: GradientBuffer
    rounded: Tensor | None  # None: the parameters stay on the host
    filled: StreamEvent = DONE
    sent: StreamEvent = DONE
    idle: threading.Event = field(default_factory=_set)  # nothing works in it, and the copy of its contents is queued
    wide: GradientBuffer | None = None  # in the master's dtype, for the caller's own steps
    arena: Arena | None = None  # of `wide`: unpinned when this reference goes

    def of(self, *, wide: bool) -> GradientBuffer:
        return self.wide if wide and self.wide is not None else self.gradients
