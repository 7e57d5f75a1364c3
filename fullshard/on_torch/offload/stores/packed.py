"""Pieces whose master rests packed: both forms of their memory, and how one becomes the other where it lies.

Training runs on packed pieces; whole units are looked at wide. Where the parameters rest on the host as well, they lie in
the half of the master's memory that packing frees: then a unit can be gathered only while it is packed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fullshard.errors import FullshardError
from fullshard.on_torch.offload.stores.packing import halves, pack, unpack
from fullshard.on_torch.offload.units import Piece

PART = 1 << 22  # elements that are packed at a time


class Packed:
    """`wide`: a piece's master and moments; `shards_of`: its parameters, by segment."""

    def __init__(
        self,
        pieces: list[Piece],
        wide: Callable[[Piece], list[Tensor]],
        shards_of: Callable[[Piece], list[Tensor]],
        device: torch.device,
    ):
        self.pieces = [p for p in pieces if p.packed]
        self.wide, self.shards_of, self.device = wide, shards_of, device
        self.now = False  # whether they are
        self.looked_at = False  # whether somebody looks at whole units

    def views(self, piece: Piece) -> list[Tensor]:
        """What the parameters do not tell of the master, in the first half of its memory, and the moments; for a pair, the
        parameters, in the other half."""
        master, *moments = self.wide(piece)
        low, rounded = halves(master)
        return [low, *moments, rounded] if piece.paired else [low, *moments]

    @torch.no_grad()
    def pack(self) -> None:
        """Before pieces are opened and units gathered."""
        if self.now or not self.pieces:
            return
        if self.looked_at:
            raise FullshardError("the model is run while its state is looked at; leave state.values() first")
        for piece in self.pieces:
            self._pack(piece)
        self.now = True

    def _pack(self, piece: Piece) -> None:
        (master, _, second), (low, _, _, *beside) = self.wide(piece), self.views(piece)
        rounded = self._like(beside[0]) if beside else self._rounded(piece)
        for part in _parts(piece):
            values, moment, half = self._here(master[part]), self._here(second[part]), self._like(low[part])
            if beside:
                rounded[part] = values
            pack(values, rounded[part], half, moment)
            low[part], second[part] = half, moment
        for memory in beside:  # at last: the end of the master lies there
            memory.copy_(rounded)

    @torch.no_grad()
    def widen(self) -> None:
        """Before whole units are looked at; at rest."""
        for piece in self.pieces if self.now else ():
            (low, _, second, *_), master = self.views(piece), self.wide(piece)[0]
            rounded = self._rounded(piece)
            for part in reversed(_parts(piece)):  # the low halves lie in the first half of what is written
                half, moment, values = self._here(low[part]), self._here(second[part]), self._like(master[part])
                unpack(rounded[part], half, moment, values)
                master[part], second[part] = values, moment
        self.now = False

    def _rounded(self, piece: Piece) -> Tensor:
        """A copy of its parameters, on the device."""
        return torch.cat(self.shards_of(piece)).to(self.device)

    def _here(self, values: Tensor) -> Tensor:
        return values.to(self.device, copy=True)

    def _like(self, values: Tensor) -> Tensor:
        return torch.empty_like(values, device=self.device)


def _parts(piece: Piece) -> list[slice]:
    """A piece in parts for which the device has room in any case."""
    return [slice(a, min(a + PART, piece.elements)) for a in range(0, piece.elements, PART)]
