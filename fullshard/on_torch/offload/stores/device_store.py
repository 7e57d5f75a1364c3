"""Stores in memory of the device, and what they share with those in host memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from fullshard.on_torch.offload.events import DONE, DeviceStream, StreamEvent
from fullshard.on_torch.offload.stores.store import ShardPart
from fullshard.on_torch.offload.units import OffloadedUnit, Piece, local


class MemoryState:
    """Master and moments in flat tensors that stay where they are."""

    def __init__(self, flats: list[Tensor]):
        self.flats = flats
        self.views: dict[int, list[Tensor]] = {}  # by piece
        self.changed: dict[int, StreamEvent] = {}  # by piece: when its memory holds the last update

    def expect(self, pieces: list[Piece]) -> None:
        pass

    def open(self, piece: Piece) -> tuple[list[Tensor], StreamEvent]:
        if piece.number not in self.views:
            self.views[piece.number] = self.view(piece)
        return self.views[piece.number], self.changed.get(piece.number, DONE)

    def view(self, piece: Piece) -> list[Tensor]:
        """What `open` returns of a piece."""
        return self.slices(piece)

    def slices(self, piece: Piece) -> list[Tensor]:
        """The piece's part of the flat tensors."""
        return [t[piece.start : piece.stop] for t in self.flats]

    def close(self, piece: Piece, changed: StreamEvent | None) -> None:
        if changed is not None:
            self.changed[piece.number] = changed

    def settle(self) -> None:
        for event in self.changed.values():
            event.wait()

    def initial(self) -> Tensor:
        return self.flats[0]

    def whole(self) -> list[Tensor]:
        return self.flats

    def shapes(self) -> list[Tensor]:
        return self.whole()

    def give_back(self, *, changed: bool) -> None:
        pass

    def stored(self, which: int, parameter: int) -> None:
        return None


class MemoryParameters(ABC):
    """Shards in memory: what those of the device and of the host have in common."""

    on_device = False

    def __init__(self, unit: OffloadedUnit):
        self.unit = unit
        self.views: dict[int, list[Tensor]] = {}  # by piece

    def segments(self, piece: Piece) -> list[Tensor]:
        if piece.number not in self.views:
            self.views[piece.number] = self.find_segments(piece)
        return self.views[piece.number]

    @abstractmethod
    def find_segments(self, piece: Piece) -> list[Tensor]:
        """Where the piece's parameters lie, by segment. Called once a piece."""

    def write(self, piece: Piece, values: Tensor, stream: DeviceStream) -> StreamEvent:
        sources = [values[s.offset : s.offset + s.stop - s.start] for s in piece.segments]
        torch._foreach_copy_(self.segments(piece), sources, non_blocking=True)
        return stream.record()

    def renew(self) -> None:
        return  # memory is written at once: nothing is due

    def skip(self, piece: Piece) -> None:
        return


class DeviceParameters(MemoryParameters):
    """The shards are FSDP's own parameters."""

    on_device = True

    def find_segments(self, piece: Piece) -> list[Tensor]:
        return [local(self.unit.params[s.parameter]).view(-1)[s.start : s.stop] for s in piece.segments]

    def send(self, copy: Callable[[list[ShardPart]], StreamEvent]) -> StreamEvent:
        return DONE  # they are there

    def publish(self, master: Tensor) -> None:
        for i, p in enumerate(self.unit.params):
            local(p).copy_(self.unit.view(master, i))
