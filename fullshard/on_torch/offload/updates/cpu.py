"""The CPU's lane: pieces that the cores update where their state rests."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fullshard.on_torch.offload.events import DONE, Moment, Stream
from fullshard.on_torch.offload.kernels.adam import Rule
from fullshard.on_torch.offload.kernels.cpu_adam import OnePass, library
from fullshard.on_torch.offload.units import Piece
from fullshard.on_torch.offload.updates.buffers import Tray, segment_views
from fullshard.on_torch.offload.updates.copy_queue import Bus
from fullshard.on_torch.offload.updates.lane import LATER, Emit, Store, unheard
from fullshard.on_torch.offload.updates.threads import Crew
from fullshard.on_torch.offload.updates.unit_update import Job

POSTING = 4  # cores that narrow parameters on their way to host memory


class Cores:
    """The gradient down, the update in place, the new parameters up.

    The lane's thread waits for gradients and shares the pieces out to the cores, and another one sends off what they have
    updated: so the cores go on with the next piece while this one's last chunk ends.
    """

    def __init__(
        self,
        device: torch.device,
        rule: Rule,
        store: Store,
        trays: list[Tray],
        emit: Emit,
        bus: Bus,
        *,
        threads: int,
    ):
        self.rule, self.store, self.trays, self.emit, self.bus = rule, store, trays, emit, bus
        self.work = Stream(device, first=True)
        self.turn = 0
        size, self.threads = teams(threads)
        self.crew, self.post = Crew("cores", size if trays else 0), Crew("post", 1 if trays else 0, cores=POSTING)
        self.depth = max(1, len(trays) // 2)  # of the trays, those that gradients come to; in the others cores work
        self.failed: Callable[[BaseException], None] = unheard

    def stage(self, job: Job, piece: Piece) -> Tray:
        tray = self.trays[self.turn % len(self.trays)]
        self.turn += 1
        tray.idle.wait()
        tray.idle.clear()
        tray.sent.wait()
        if piece.number not in job.drained:
            gradients = tray.of(wide=job.wide)
            tray.filled = self.bus.down.send(*job.copies(piece, gradients.of(piece)), job.ready)
            self.bus.moved_down += piece.elements * gradients.memory.itemsize
            job.read()
        return tray

    def apply(self, job: Job, piece: Piece, tray: Tray) -> Moment:
        factors, skip = job.go.wait()
        resting, there = self.store.open(piece)
        if skip:
            self.store.close(piece, None)
            tray.idle.set()
            return DONE
        gradient, filled = job.drained.get(piece.number, (tray.of(wide=job.wide).memory, tray.filled))
        for moment in (filled, there):
            moment.wait()
        rounded = resting[3] if piece.paired else tray.rounded if piece.away.unit.home.params == "device" else None
        state = resting[: 1 + self.rule.slots]
        update = OnePass(self.rule, state, gradient, rounded, [f for f in factors if f != 1.0], self.threads)
        calls = update.calls((start, stop, job.steps[i], job.groups[i]) for start, stop, i in job.runs(piece))
        self.crew.share(update.run, calls, partial(self._updated, job, piece, tray, resting[0]))
        return LATER

    def release(self) -> None:
        """The lane is broken: nobody may wait for what does not come."""
        for tray in self.trays:
            tray.idle.set()

    def _updated(self, job: Job, piece: Piece, tray: Tray, master: Tensor, error: BaseException | None) -> None:
        if error is not None:
            self.failed(error)
            tray.idle.set()
            job.issue(DONE)
        else:
            self.post.share(self._send, [(job, piece, tray, master)], lambda _: None)

    def _send(self, job: Job, piece: Piece, tray: Tray, master: Tensor) -> None:
        """New parameters on their way to where the unit's shards rest."""
        new = DONE
        try:
            if piece.away.unit.home.params == "device":
                new = tray.sent = self._up(job, piece, tray)
            elif not piece.paired:  # of a pair, the parameters were updated where they rest
                new = self.emit(piece, master, self.work)
            self.store.close(piece, new)
        except BaseException as error:
            self.failed(error)  # before anybody goes on who waits for the piece
        tray.idle.set()
        job.issue(new)

    def _up(self, job: Job, piece: Piece, tray: Tray) -> Moment:
        """To the shards on the device, but for parameters that had no gradient."""
        assert tray.rounded is not None
        there = zip(piece.segments, self.store.shards_of(piece), segment_views(tray.rounded, piece, flat=True), strict=True)
        pairs = [(shard, part) for s, shard, part in there if job.had[s.parameter]]
        self.bus.moved_up += sum(part.nbytes for _, part in pairs)
        return self.bus.up.send([shard for shard, _ in pairs], [part for _, part in pairs])


def teams(threads: int) -> tuple[int, int]:
    """How many pieces the cores update at a time, and how many cores each: two, where updates are compiled, so that one's
    end is no pause; torch's kernels run on one core each, which share the pieces out among them."""
    if library() is None or threads < 2:
        return threads, 1
    return 2, threads // 2
