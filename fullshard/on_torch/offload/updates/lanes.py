"""Both lanes with their memory: staging slots and a workspace on the device, pinned buffers on the host.

All of it is taken once, at the start. Only steps of the caller's own need buffers in the master's dtype, and take them then.
"""

from functools import partial
from typing import NamedTuple

import torch

from fullshard.on_torch.offload.stores.offload_memory import OffloadMemory
from fullshard.on_torch.offload.updates.copy_queue import CopyQueues
from fullshard.on_torch.offload.updates.cpu_lane import CpuUpdater
from fullshard.on_torch.offload.updates.cpu_share import update_threads
from fullshard.on_torch.offload.updates.gpu_lane import GpuUpdater
from fullshard.on_torch.offload.updates.staging_buffers import CpuBuffer, GradientBuffer, StagingSlot, Workspace
from fullshard.on_torch.offload.updates.update_lane import UpdateLane
from fullshard.storage.pinned_arena import Arena, room


class Lanes(NamedTuple):
    """What updates the pieces on each device, and the queue that it takes them from."""

    gpu: GpuUpdater
    gpu_lane: UpdateLane
    cpu: CpuUpdater
    cpu_lane: UpdateLane


def make_lanes(memory: OffloadMemory, queues: CopyQueues, gradients: torch.dtype) -> Lanes:
    """Starts their threads. `gradients`: the dtype of those that arrive in a step of the engine's own."""
    slots, workspace = make_staging(memory)
    buffers = make_cpu_buffers(memory, gradients)
    device, rule, low_bit, in_turn = memory.device, memory.rule, memory.low_bit, memory.sizes.in_turn
    gpu = GpuUpdater(device, rule, slots, workspace, queues, low_bit)
    cpu = CpuUpdater(device, rule, buffers, queues, threads=update_threads(), low_bit=low_bit)
    gpu_lane = UpdateLane("gpu", max(1, len(slots)), gpu, in_turn=in_turn)
    cpu_lane = UpdateLane("cpu", cpu.depth, cpu, in_turn=in_turn)
    cpu.failed, gpu.failed = cpu_lane.fail, gpu_lane.fail
    return Lanes(gpu, gpu_lane, cpu, cpu_lane)


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
