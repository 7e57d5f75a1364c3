"""Copies the shards of an offloaded unit to the device before FSDP gathers from them, and frees that memory afterwards."""

import torch

from fullshard.on_torch.offload.stores.packed_state import Packing
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit
from fullshard.on_torch.offload.units.store_protocols import ShardPart
from fullshard.on_torch.tensors.streams import DONE, DeviceStream, StreamEvent


class ShardFetcher:
    """One stream of copies for all units. `fetched_bytes` counts since the start."""

    def __init__(self, device: torch.device, packing: Packing):
        self.device, self.packing = device, packing
        self.stream = DeviceStream(device)
        self.fetched_bytes = 0
        self.consumed = DONE  # the last fetched shard has been gathered from

    def fetch(self, unit: OffloadedUnit, after: list[StreamEvent]) -> StreamEvent:
        """Copy a unit's shards to the device, for one gather."""
        self.packing.pack()  # an evaluation may follow a save

        def copy(parts: list[ShardPart]) -> StreamEvent:
            with self.stream, torch.no_grad():
                self.stream.after(self.consumed, *after)
                buffers = _allocate(unit)
                targets = [buffers[id(unit.params[i])][at : at + part.numel()] for i, at, part in parts]
                if parts:  # a rank may have nothing of a unit
                    torch._foreach_copy_(targets, [part for _, _, part in parts], non_blocking=True)
                self.fetched_bytes += sum(t.nbytes for t in targets)
                return self.stream.record()

        unit.fetched = unit.shards.send(copy)
        return unit.fetched

    def release(self, unit: OffloadedUnit) -> None:
        """The current stream has gathered from the shards: free their memory on the device."""
        self.consumed = StreamEvent.here(self.device)
        free_shards(unit)


def _allocate(unit: OffloadedUnit) -> dict[int, torch.Tensor]:
    """Memory for the shards on the device, by parameter."""
    found = {}
    for p, memory in unit.group.buffers():
        memory.untyped_storage().resize_(memory.numel() * memory.element_size())
        found[id(p)] = memory
    return found


def free_shards(unit: OffloadedUnit) -> None:
    for _, memory in unit.group.buffers():
        memory.untyped_storage().resize_(0)
