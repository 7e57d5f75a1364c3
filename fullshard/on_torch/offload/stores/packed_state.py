"""State of which only the low 16 bits of each fp32 master are stored: both forms of its memory, converted in place.

The high bits are those of the bf16 parameter (`packed_masters`). Training runs on the packed form; state.values()
sees the wide one. If the parameters have their home on the host as well, they are paired with the state: they lie in the
half of the master's memory that packing frees. Then a unit can be gathered only while it is packed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fullshard.base.errors import FullshardError
from fullshard.on_torch.offload.stores.device_store import MemoryParameters, MemoryState
from fullshard.on_torch.offload.stores.state_layout import StateLayout
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit, Piece
from fullshard.on_torch.offload.units.store_protocols import ShardPart
from fullshard.on_torch.optimizers.packed_masters import halves, pack, unpack
from fullshard.on_torch.tensors.streams import StreamEvent

PART = 1 << 22  # elements that are converted at a time: the device has memory for so many in any case


class Packing:
    """All packed pieces of a rank, which are packed and widened together."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stores: list[PackedState] = []
        self.packed = False  # the form that all of them have now
        self.looked_at = False  # whole units are in use

    @torch.no_grad()
    def pack(self) -> None:
        """Before pieces are opened and units gathered."""
        pieces = self._pieces()
        if self.packed or not pieces:
            return
        if self.looked_at:
            raise FullshardError("the model is run while its state is looked at; leave state.values() first")
        for store, piece in pieces:
            self._pack(store, piece)
        self.packed = True

    def _pieces(self) -> "list[tuple[PackedState, Piece]]":
        return [(store, piece) for store in self.stores for piece in store.unit.pieces if piece.packed]

    def _pack(self, store: "PackedState", piece: Piece) -> None:
        (master, _, second), (low, _, _, *paired) = store.slices(piece), store.view(piece)
        rounded = self._like(paired[0]) if paired else self._rounded(piece)
        for part in _parts(piece):
            values, moment, half = self._here(master[part]), self._here(second[part]), self._like(low[part])
            if paired:
                rounded[part] = values
            pack(values, rounded[part], half, moment)
            low[part], second[part] = half, moment
        for memory in paired:  # last: the end of the master lies there
            memory.copy_(rounded)

    @torch.no_grad()
    def widen(self) -> None:
        """Before whole units are looked at; no update may be under way."""
        for store, piece in self._pieces() if self.packed else ():
            (low, _, second, *_), master = store.view(piece), store.slices(piece)[0]
            rounded = self._rounded(piece)
            for part in reversed(_parts(piece)):  # the low halves lie in the first half of what is written
                half, moment, values = self._here(low[part]), self._here(second[part]), self._like(master[part])
                unpack(rounded[part], half, moment, values)
                master[part], second[part] = values, moment
        self.packed = False

    def _rounded(self, piece: Piece) -> Tensor:
        """A copy of its parameters, on the device."""
        return torch.cat(piece.unit.shards.segments(piece)).to(self.device)

    def _here(self, values: Tensor) -> Tensor:
        return values.to(self.device, copy=True)

    def _like(self, values: Tensor) -> Tensor:
        return torch.empty_like(values, device=self.device)


class PackedState(MemoryState):
    """Master and moments in host memory, packed while training runs. The CPU updates some pieces wide (`Piece.packed`)."""

    def __init__(self, unit: OffloadedUnit, flats: list[Tensor], layout: StateLayout, packing: Packing):
        super().__init__(unit, flats, layout)
        self.packing = packing
        packing.stores.append(self)

    def view(self, piece: Piece) -> list[Tensor]:
        """Of a packed piece: the low halves, in the first half of the master's memory, and the moments. Of a paired one, the
        parameters as well, from the other half."""
        master, *moments = self.slices(piece)
        if not piece.packed:
            return [master, *moments]
        low, rounded = halves(master)
        return [low, *moments, rounded] if piece.paired else [low, *moments]

    def whole(self) -> list[Tensor]:
        self.packing.widen()
        return self.flats


class PairedParameters(MemoryParameters):
    """Shards in the masters' memory. `memory` has the frozen ones, which have no moments and are not packed."""

    def __init__(self, unit: OffloadedUnit, state: PackedState, memory: Tensor):
        super().__init__(unit)
        self.state, self.memory = state, memory

    def find_segments(self, piece: Piece) -> list[Tensor]:
        return piece.segment_views(halves(self.state.slices(piece)[0])[1], flat=True)

    def send(self, copy: Callable[[list[ShardPart]], StreamEvent]) -> StreamEvent:
        every = [pair for piece in self.unit.pieces for pair in zip(piece.segments, self.segments(piece), strict=True)]
        frozen = range(self.unit.trained, len(self.unit.params))
        return copy([(s.parameter, s.start, part) for s, part in every] + [(i, 0, self._frozen(i)) for i in frozen])

    def publish(self, master: Tensor) -> None:
        """The trained ones are made when the unit is packed again."""
        for i in range(self.unit.trained, len(self.unit.params)):
            low, high = self.unit.spans[i]
            self._frozen(i).copy_(master[low:high])

    def _frozen(self, index: int) -> Tensor:
        low, high = (at - self.unit.moving for at in self.unit.spans[index])
        return self.memory[low:high]


def _parts(piece: Piece) -> list[slice]:
    return [slice(a, min(a + PART, piece.elements)) for a in range(0, piece.elements, PART)]
