"""Shards in pinned host memory of their own. Master and moments on the host are a `MemoryState` over pinned memory."""

import itertools
from collections.abc import Callable

from torch import Tensor

from fullshard.on_torch.offload.stores.device_store import MemoryParameters
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit, Piece
from fullshard.on_torch.offload.units.store_protocols import ShardPart
from fullshard.on_torch.tensors.streams import StreamEvent


class HostParameters(MemoryParameters):
    """`memory`: flat, with each parameter padded as FSDP gathers it."""

    def __init__(self, unit: OffloadedUnit, memory: Tensor):
        super().__init__(unit)
        self.memory = memory
        self.starts = [0, *itertools.accumulate(unit.padded)][:-1]  # of each parameter's padded shard

    def find_segments(self, piece: Piece) -> list[Tensor]:
        return [self.memory[self.starts[s.parameter] + s.start : self.starts[s.parameter] + s.stop] for s in piece.segments]

    def send(self, copy: Callable[[list[ShardPart]], StreamEvent]) -> StreamEvent:
        spans = zip(self.starts, self.unit.padded, strict=True)
        return copy([(i, 0, self.memory[at : at + size]) for i, (at, size) in enumerate(spans)])

    def publish(self, master: Tensor) -> None:
        for i, (low, high) in enumerate(self.unit.spans):
            at = self.starts[i]
            self.memory[at : at + high - low].copy_(master[low:high])
