"""Memory of the lanes: staging slots and a workspace on the device, pinned buffers on the host.

All of it is taken once, at the start. Only steps of the caller's own need buffers in the master's dtype, and take them then.
"""

from functools import partial

import torch

from fullshard.on_torch.offload.stores.offload_memory import OffloadMemory
from fullshard.on_torch.offload.updates.staging_buffers import CpuBuffer, GradientBuffer, StagingSlot, Workspace
from fullshard.storage.pinned_arena import Arena, room


def make_staging(memory: OffloadMemory) -> tuple[list[StagingSlot], Workspace]:
    """Device memory for the pieces that are streamed through it; none if no piece is."""
    master, staging, layout = memory.master, memory.sizes.staging_layout(), memory.layout
    first, largest = torch.int16 if staging.low_halves else master, memory.sizes.largest
    made = partial(torch.zeros, largest, device=memory.device)
    kinds = list(zip(layout.lengths(largest, largest), [first, *layout.dtypes[1:]], strict=True))
    slots = [
        StagingSlot([torch.zeros(n, dtype=t, device=memory.device) for n, t in kinds], layout.moments)
        for _ in range(staging.slots)
    ]
    gradient = made(dtype=master) if slots else torch.empty(0)
    wide = made(dtype=master) if staging.master else None
    return slots, Workspace(GradientBuffer(gradient), wide, made(dtype=memory.compute) if staging.params else None)


def make_cpu_buffers(memory: OffloadMemory, dtype: torch.dtype) -> list[CpuBuffer]:
    """Host memory for the pieces that the CPU updates. `dtype`: of their gradients."""

    def pinned(kind: torch.dtype) -> torch.Tensor:
        return memory.arena.take(memory.sizes.largest * kind.itemsize).view(kind)

    sends, count = memory.sizes.cpu_sends, memory.sizes.cpu_buffers
    return [CpuBuffer(GradientBuffer(pinned(dtype)), pinned(memory.compute) if sends else None) for _ in range(count)]


def widen_cpu_buffers(buffers: list[CpuBuffer], memory: OffloadMemory) -> None:
    """Add room for gradients in the master's dtype: the caller's own may be sums, or scaled, and are used as they are."""
    missing = [buffer for buffer in buffers if buffer.wide is None]
    if not missing:
        return
    nbytes = memory.sizes.largest * memory.master.itemsize
    arena = Arena(room([nbytes] * len(missing)), memory.device.type == "cuda", "gradients of the caller's own steps")
    for buffer in missing:
        buffer.wide, buffer.arena = GradientBuffer(arena.take(nbytes).view(memory.master)), arena
