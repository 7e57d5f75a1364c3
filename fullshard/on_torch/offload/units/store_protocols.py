"""What the optimizer, the lanes and checkpoints ask of the memory or file that a unit's bytes lie in.

An offloaded unit has two stores, as its plan names two homes: one for master and moments, one for the shards that FSDP
gathers from. `choose_stores` picks both.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from fullshard.on_torch.offload.units.offloaded_unit import Piece
from fullshard.on_torch.tensors.streams import DeviceStream, StreamEvent

ShardPart = tuple[int, int, Tensor]  # parameter, start in the memory that it is gathered from, values


class Readable(Protocol):
    """One tensor's bytes in a file."""

    def read(self, start: int, into: Tensor) -> None:
        """Fill `into` with the bytes from `start` on."""


class StateStore(Protocol):
    """Master and moments of one unit."""

    def expect(self, pieces: list[Piece]) -> None:
        """These pieces will be opened, in this order."""

    def open(self, piece: Piece) -> tuple[list[Tensor], StreamEvent]:
        """The piece's master and moments in memory, and when that memory holds them. Of a packed piece, the low halves of
        the master; of a paired one, its parameters as well, at the end."""

    def close(self, piece: Piece, changed: StreamEvent | None) -> None:
        """The piece's memory has new values after `changed`; None: it is as it was."""

    def settle(self) -> None:
        """Wait until every change is in its place."""

    def initial(self) -> Tensor:
        """Memory for the initial values of the flat master."""

    def whole(self) -> list[Tensor]:
        """The flat master and moments in memory; of a file, a copy until `give_back`."""

    def shapes(self) -> list[Tensor]:
        """As `whole`, but what lies in a file is not read: tensors on meta stand for it."""

    def give_back(self, *, changed: bool) -> None:
        """The tensors of `whole` are used no more. `changed`: they have new values."""

    def stored(self, which: int, parameter: int) -> Readable | None:
        """A parameter's master (0) or a moment in the file; None where they are in memory."""


class ParameterStore(Protocol):
    """The shards of one unit, in the compute dtype."""

    on_device: bool  # FSDP gathers from them where they are

    def segments(self, piece: Piece) -> list[Tensor]:
        """The piece's parameters in memory, by segment. Never asked of shards on disk."""

    def write(self, piece: Piece, values: Tensor, stream: DeviceStream) -> StreamEvent:
        """Store a piece's new parameters, of any dtype; queued on `stream`. Returns when `values` has been read."""

    def renew(self) -> None:
        """The unit will be updated: each of its pieces is written or skipped once."""

    def skip(self, piece: Piece) -> None:
        """The piece's parameters stay as they are."""

    def send(self, copy: Callable[[list[ShardPart]], StreamEvent]) -> StreamEvent:
        """Call `copy` with the shards in host memory, which stays as it is until the moment that `copy` returns."""

    def publish(self, master: Tensor) -> None:
        """New shards from the flat master."""
