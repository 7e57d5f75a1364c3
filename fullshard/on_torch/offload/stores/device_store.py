"""Stores in memory of the device, and what they share with those in host memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from fullshard.on_torch.offload.stores.state_layout import StateLayout
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit, Piece
from fullshard.on_torch.offload.units.store_protocols import Readable, ShardPart
from fullshard.on_torch.optimizers.decoded_moment import DecodedMoment
from fullshard.on_torch.tensors.shard_ranges import local
from fullshard.on_torch.tensors.streams import DONE, DeviceStream, StreamEvent


class MemoryState:
    """Master and moments in flat tensors that stay where they are. Moments of bytes are shown as decoded copies."""

    def __init__(self, unit: OffloadedUnit, flats: list[Tensor], layout: StateLayout):
        self.unit, self.flats, self.layout = unit, flats, layout
        self.decoded: list[Tensor] | None = None  # the whole unit as values, between `whole` and `give_back`
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
        return self.layout.slices(self.flats, piece.start, piece.stop)

    def close(self, piece: Piece, changed: StreamEvent | None) -> None:
        if changed is not None:
            self.changed[piece.number] = changed

    def settle(self) -> None:
        for event in self.changed.values():
            event.wait()

    def initial(self) -> Tensor:
        return self.flats[0]

    def whole(self) -> list[Tensor]:
        if not self.layout.moments.coded:
            return self.flats
        self.decoded = self.decoded or self.layout.decoded(self.flats, self.unit.moving)
        return self.decoded

    def shapes(self) -> list[Tensor]:
        if not self.layout.moments.coded:
            return self.whole()
        like = [torch.empty(self.unit.moving, dtype=d, device="meta") for d in self.layout.shown[1:]]
        return [self.flats[0], *like]

    def give_back(self, *, changed: bool) -> None:
        decoded, self.decoded = self.decoded, None
        if changed and decoded is not None:
            self.layout.encode(decoded, self.flats)

    def stored(self, which: int, parameter: int) -> Readable | None:
        if which == 0 or not self.layout.moments.coded:
            return None
        first = self.unit.starts[parameter]
        moments = self.layout.moments
        return DecodedMoment(lambda a, b: moments.part(self.flats[which], first + a, first + b), moments, which == 1)


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
