"""Pinned memory for the gradients of the CPU's pieces, between backward and the global norm."""

import torch
from torch import Tensor

from fullshard.on_torch.offload.stores.offload_memory import OffloadMemory
from fullshard.on_torch.offload.units.unit_update import UnitUpdate
from fullshard.on_torch.offload.updates.copy_queue import CopyQueues
from fullshard.on_torch.tensors.streams import DeviceStream
from fullshard.storage.pinned_arena import Arena, room


class HostGradients:
    """Takes its memory in the first step that needs it."""

    def __init__(self, memory: OffloadMemory, dtype: torch.dtype, queues: CopyQueues):
        self.memory, self.dtype, self.queues = memory, dtype, queues
        self.stream = DeviceStream(memory.device)
        self.flats: dict[int, Tensor] = {}  # by piece
        self.views: dict[int, list[Tensor]] = {}  # by piece: its segments

    def allocate(self) -> None:
        """Once."""
        if self.flats:
            return
        pieces = [p for u in self.memory.units for p in u.pieces if p.lane == "cpu"]
        sizes = self.memory.sizes.waiting_gradients()
        self.arena = Arena(room(sizes), self.memory.device.type == "cuda", "gradients that wait for the global norm")
        self.flats = {p.number: self.arena.take(n).view(self.dtype) for p, n in zip(pieces, sizes, strict=True)}
        self.views = {p.number: p.segment_views(self.flats[p.number]) for p in pieces}

    def copy(self, update: UnitUpdate) -> None:
        """Copy the CPU's share of a unit's gradients to the host."""
        with self.stream:
            self.stream.after(update.ready)
            for piece in update.unit.pieces:
                if piece.lane == "cpu":
                    target = self.flats[piece.number]
                    update.collect(piece, self.views[piece.number])
                    update.on_host[piece.number] = (target, self.stream.record())
                    self.queues.moved_down += target.nbytes
        for g in {g.untyped_storage().data_ptr(): g for g in update.gradients if g is not None}.values():
            self.stream.keep(g)
        if all(piece.lane == "cpu" for piece in update.unit.pieces):
            update.gradients = []  # all of them are on the host
