"""The GPU lane: pieces whose state is copied to the device, updated there, and copied back."""

import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from fullshard.on_torch.offload.units.offloaded_unit import Piece
from fullshard.on_torch.offload.units.unit_update import UnitUpdate
from fullshard.on_torch.offload.updates.copy_queue import CopyQueues
from fullshard.on_torch.offload.updates.low_bit_pieces import LowBitPiece
from fullshard.on_torch.offload.updates.staging_buffers import StagingSlot, Workspace
from fullshard.on_torch.offload.updates.update_lane import raise_now, skip
from fullshard.on_torch.offload.updates.worker_threads import WorkerThreads
from fullshard.on_torch.optimizers.adam_update import Rule, apply_rule
from fullshard.on_torch.optimizers.low_bit_update import LowBitRule
from fullshard.on_torch.optimizers.packed_masters import pack, unpack
from fullshard.on_torch.tensors.streams import DONE, DeviceStream, StreamEvent
from fullshard.on_torch.tensors.usable_kernel import Found, usable_kernel


class GpuUpdater:
    """Copies state to the device, updates it, and copies it back. On a CPU the copies stay in memory.

    A thread of its own copies state back: the next updates do not wait for PCIe, nor does a forward that needs them.
    """

    def __init__(
        self,
        device: torch.device,
        rule: Rule,
        slots: list[StagingSlot],
        workspace: Workspace,
        queues: CopyQueues,
        low_bit: LowBitRule | None = None,
    ):
        self.low_bit = low_bit
        self.rule, self.slots, self.workspace, self.queues = rule, slots, workspace, queues
        self.work = DeviceStream(device, first=True)
        self.turn = 0
        self.returners = WorkerThreads("back", 1 if slots else 0)
        self.returned: dict[int, threading.Event] = {}  # by piece: the copy of its state to the host is queued
        self.triton_kernel = triton_kernel(device, rule) if slots else None
        self.failed: Callable[[BaseException], None] = raise_now

    def stage(self, update: UnitUpdate, piece: Piece) -> tuple[StagingSlot, list[Tensor]]:
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        if piece.number in self.returned:
            self.returned[piece.number].wait()
        slot.idle.wait()
        slot.idle.clear()
        stored, there = piece.unit.state.open(piece)
        slot.filled = self.queues.up.send(slot.of(piece), stored, slot.free, there)
        self.queues.moved_up += sum(t.nbytes for t in stored)
        return slot, stored

    def apply(self, update: UnitUpdate, piece: Piece, staged: tuple[StagingSlot, list[Tensor]]) -> StreamEvent:
        slot, stored = staged
        _, skipped = update.decision.wait()
        if skipped:
            skip(piece)
            slot.idle.set()
            return DONE
        with self.work:
            self.work.after(slot.filled, update.ready, update.decision.event)
            apply = self._by_triton if piece.packed and self.triton_kernel is not None else self._by_torch
            new = apply(update, piece, slot)
            updated = self.work.record()
        self.returned[piece.number] = threading.Event()
        self.returners.share(self._return, [(piece, slot, stored, updated)], lambda _: None)
        return new

    def _return(self, piece: Piece, slot: StagingSlot, stored: list[Tensor], updated: StreamEvent) -> None:
        try:
            state = stored[: 1 + self.rule.slots]  # the parameters of a pair were copied before
            slot.free = self.queues.down.send(state, slot.of(piece)[: len(state)], updated)
            self.queues.moved_down += sum(t.nbytes for t in state)
            piece.unit.state.close(piece, slot.free)
        except BaseException as error:
            self.failed(error)
        slot.idle.set()
        self.returned[piece.number].set()

    def release(self) -> None:
        """The lane has failed: wake whoever waits for its memory."""
        for event in (*(slot.idle for slot in self.slots), *self.returned.values()):
            event.set()

    def settle(self) -> None:
        """Wait until the copies of all state to the host are queued."""
        for event in list(self.returned.values()):
            event.wait()

    def _by_triton(self, update: UnitUpdate, piece: Piece, slot: StagingSlot) -> StreamEvent:
        """Update a packed piece with the Triton kernel, one call for each segment."""
        assert self.triton_kernel is not None
        for s, (parameters, state) in zip(piece.segments, self._words(piece, slot), strict=True):
            gradient = update.gradients[s.parameter]
            if gradient is not None:
                step, group = update.steps[s.parameter], update.groups[s.parameter]
                part = gradient.reshape(-1) if s.whole else gradient.reshape(-1)[s.start : s.stop]
                self.triton_kernel.update_packed(self.rule, part, parameters, state, update.decision.scale, step, group)
        update.read()
        return self._out(piece, slot.of(piece)[3]) if piece.paired else self.work.record()

    def _words(self, piece: Piece, slot: StagingSlot) -> list[tuple[Tensor, list[Tensor]]]:
        """A piece's parameters and state as the kernel takes them, by segment."""
        if piece.number not in slot.words:
            assert self.triton_kernel is not None
            staged = slot.of(piece)
            parameters = piece.segment_views(staged[3], flat=True) if piece.paired else piece.unit.shards.segments(piece)
            states = zip(*(piece.segment_views(t, flat=True) for t in staged[:3]), strict=True)
            slot.words[piece.number] = [self.triton_kernel.words(*both) for both in zip(parameters, states, strict=True)]
        return slot.words[piece.number]

    def _by_torch(self, update: UnitUpdate, piece: Piece, slot: StagingSlot) -> StreamEvent:
        """Update a piece with torch's kernels, in the workspace."""
        staged, gradient = slot.of(piece), self._gradient(update, piece)
        master, *moments = self._wide(piece, staged)
        if self.low_bit is not None:
            coded = LowBitPiece(self.low_bit, staged, gradient, None, _factors(update))
            for call in coded.calls(update, piece):
                coded.run(*call)
        for start, stop, index in update.runs(piece) if self.low_bit is None else ():
            part = [t[start:stop] for t in (master, gradient, *moments)]
            apply_rule(self.rule, part[0], part[1], part[2:], update.steps[index], update.groups[index])
        rounded = self._rounded(piece, staged)
        new = self._out(piece, master if rounded is None else rounded.copy_(master))
        if piece.packed:
            assert rounded is not None
            low, _, second = staged[:3]
            pack(master, rounded, low, second)
        return new

    def _gradient(self, update: UnitUpdate, piece: Piece) -> Tensor:
        update.collect(piece, self.workspace.gradients.of(piece))
        update.read()
        gradient = self.workspace.gradients.memory[: piece.elements]
        for factor in _factors(update) if self.low_bit is None else ():
            gradient.mul_(factor.to(gradient.dtype))
        return gradient

    def _wide(self, piece: Piece, staged: list[Tensor]) -> list[Tensor]:
        """Master and moments of a piece, unpacked."""
        if not piece.packed:
            return staged
        low, first, second = staged[:3]
        rounded = self._rounded(piece, staged)
        assert self.workspace.master is not None
        assert rounded is not None
        master = self.workspace.master[: piece.elements]
        if not piece.paired:
            torch._foreach_copy_(piece.segment_views(rounded, flat=True), piece.unit.shards.segments(piece))
        unpack(rounded, low, second, master)
        return [master, first, second]

    def _rounded(self, piece: Piece, staged: list[Tensor]) -> Tensor | None:
        """Memory for a piece's parameters in the compute dtype; None if only the master is needed. They come with a pair, are
        collected to unpack the master, or go to the host in this dtype."""
        if piece.paired:
            return staged[3]
        if not piece.packed and piece.unit.shards.on_device:
            return None
        assert self.workspace.rounded is not None
        return self.workspace.rounded[: piece.elements]

    def _out(self, piece: Piece, parameters: Tensor) -> StreamEvent:
        """Store the new parameters in the unit's shards."""
        if not piece.unit.shards.on_device:
            self.queues.moved_down += parameters.nbytes
        return piece.unit.shards.write(piece, parameters, self.work)


def _factors(update: UnitUpdate) -> list[Tensor]:
    return [] if update.decision.scale is None else list(update.decision.scale)


def triton_kernel(device: torch.device, rule: Rule) -> ModuleType | None:
    """The module `triton_adam` if it can be used, else None."""
    return find_kernel(device, rule)[0]


@cache
def find_kernel(device: torch.device, rule: Rule) -> Found:
    """The module `triton_adam`, or None and the reason."""
    if device.type != "cuda" or rule.kind not in ("adamw", "adam"):
        return None, "it has none for this device" if device.type != "cuda" else f"it has none for {rule.kind}"

    def find() -> ModuleType | None:
        from fullshard.on_torch.optimizers import triton_adam

        return triton_adam if triton_adam.agrees(rule, device) else None

    return usable_kernel("the optimizer's update", find)
