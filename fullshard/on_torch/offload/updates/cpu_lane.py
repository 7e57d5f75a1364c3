"""The CPU lane: pieces that the CPU updates in host memory."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fullshard.on_torch.offload.units.offloaded_unit import Piece
from fullshard.on_torch.offload.units.unit_update import UnitUpdate
from fullshard.on_torch.offload.updates.copy_queue import CopyQueues
from fullshard.on_torch.offload.updates.low_bit_pieces import LowBitPiece
from fullshard.on_torch.offload.updates.staging_buffers import CpuBuffer
from fullshard.on_torch.offload.updates.update_lane import LATER, raise_now, skip
from fullshard.on_torch.offload.updates.worker_threads import WorkerThreads
from fullshard.on_torch.optimizers.adam_update import Rule
from fullshard.on_torch.optimizers.cpu_adam import OnePass, library
from fullshard.on_torch.optimizers.low_bit_update import LowBitRule
from fullshard.on_torch.tensors.streams import DONE, DeviceStream, StreamEvent

SENDER_CORES = 4  # that convert new parameters to the compute dtype


class CpuUpdater:
    """Copies gradients to the host, updates the state in place, and sends the new parameters.

    The lane's thread waits for gradients and queues the calls. Worker threads run them, and another thread sends the results:
    the workers go on with the next piece meanwhile.
    """

    def __init__(
        self,
        device: torch.device,
        rule: Rule,
        buffers: list[CpuBuffer],
        queues: CopyQueues,
        *,
        threads: int,
        low_bit: LowBitRule | None = None,
    ):
        self.rule, self.buffers, self.queues, self.low_bit = rule, buffers, queues, low_bit
        self.work = DeviceStream(device, first=True)
        self.turn = 0
        size, self.threads = teams(threads)
        self.workers = WorkerThreads("cpu-update", size if buffers else 0)
        self.senders = WorkerThreads("cpu-send", 1 if buffers else 0, cores=SENDER_CORES)
        self.depth = max(1, len(buffers) // 2)  # half of the buffers receive gradients, the others are worked on
        self.failed: Callable[[BaseException], None] = raise_now

    def stage(self, update: UnitUpdate, piece: Piece) -> CpuBuffer:
        buffer = self.buffers[self.turn % len(self.buffers)]
        self.turn += 1
        buffer.idle.wait()
        buffer.idle.clear()
        buffer.sent.wait()
        if piece.number not in update.on_host:
            gradients = buffer.of(wide=update.wide)
            buffer.filled = self.queues.down.send(*update.gradient_copies(piece, gradients.of(piece)), update.ready)
            self.queues.moved_down += piece.elements * gradients.memory.itemsize
            update.read()
        return buffer

    def apply(self, update: UnitUpdate, piece: Piece, buffer: CpuBuffer) -> StreamEvent:
        factors, skipped = update.decision.wait()
        stored, there = piece.unit.state.open(piece)
        if skipped:
            skip(piece)
            buffer.idle.set()
            return DONE
        gradient, filled = update.on_host.get(piece.number, (buffer.of(wide=update.wide).memory, buffer.filled))
        for event in (filled, there):
            event.wait()
        rounded = stored[3] if piece.paired else buffer.rounded if piece.unit.shards.on_device else None
        state = stored[: 1 + self.rule.slots]
        factors, done = [f for f in factors if f != 1.0], partial(self._updated, update, piece, buffer, stored[0])
        if self.low_bit is not None:
            coded = LowBitPiece(self.low_bit, state, gradient, rounded, factors)
            self.workers.share(coded.run, coded.calls(update, piece), done)
            return LATER
        adam = OnePass(self.rule, state, gradient, rounded, factors, self.threads)
        calls = adam.calls((start, stop, update.steps[i], update.groups[i]) for start, stop, i in update.runs(piece))
        self.workers.share(adam.run, calls, done)
        return LATER

    def release(self) -> None:
        """The lane has failed: wake whoever waits for a buffer."""
        for buffer in self.buffers:
            buffer.idle.set()

    def _updated(self, update: UnitUpdate, piece: Piece, buffer: CpuBuffer, master: Tensor, error: BaseException | None) -> None:
        if error is not None:
            self.failed(error)
            buffer.idle.set()
            update.issue(DONE)
        else:
            self.senders.share(self._send, [(update, piece, buffer, master)], lambda _: None)

    def _send(self, update: UnitUpdate, piece: Piece, buffer: CpuBuffer, master: Tensor) -> None:
        """Store the new parameters in the unit's shards."""
        new = DONE
        try:
            if piece.unit.shards.on_device:
                new = buffer.sent = self._up(update, piece, buffer)
            elif not piece.paired:  # the parameters of a pair were updated in place
                new = piece.unit.shards.write(piece, master, self.work)
            piece.unit.state.close(piece, new)
        except BaseException as error:
            self.failed(error)  # before those go on who wait for the piece
        buffer.idle.set()
        update.issue(new)

    def _up(self, update: UnitUpdate, piece: Piece, buffer: CpuBuffer) -> StreamEvent:
        """Copy to the shards on the device, except parameters that had no gradient."""
        assert buffer.rounded is not None
        there = zip(
            piece.segments, piece.unit.shards.segments(piece), piece.segment_views(buffer.rounded, flat=True), strict=True
        )
        pairs = [(shard, part) for s, shard, part in there if update.had[s.parameter]]
        self.queues.moved_up += sum(part.nbytes for _, part in pairs)
        return self.queues.up.send([shard for shard, _ in pairs], [part for _, part in pairs])


def teams(threads: int) -> tuple[int, int]:
    """How many calls run at a time, and on how many cores each. Compiled updates run two calls, so that the end of one is no
    pause. Torch's kernels run on one core each."""
    if library() is None or threads < 2:
        return threads, 1
    return 2, threads // 2
