"""Who updates a piece of an away unit: the GPU, with the state streamed past it, or the CPU's cores, where it rests.

Each lane has a few slots of staging memory. It brings the next piece's bytes while this one is worked on, and tells the
unit's job when the new parameters are queued. Gradients come in, parameters go out; the rest of the step only ever waits
for those.

The interpreter is shared with the thread that queues forward and backward, and every small call here delays a kernel
there: copies of many parts are one call, and views that stay the same are made once.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from fullshard.on_torch.away.bus import Bus
from fullshard.on_torch.away.crew import Crew
from fullshard.on_torch.away.jobs import Job
from fullshard.on_torch.away.one_pass import OnePass, library
from fullshard.on_torch.away.packing import pack, unpack
from fullshard.on_torch.away.rule import Rule, apply_rule
from fullshard.on_torch.away.streams import DONE, Moment, Stream
from fullshard.on_torch.away.trays import Bench, Slot, Tray, segment_views
from fullshard.on_torch.away.units import Piece

POSTING = 4  # cores that narrow parameters on their way to host memory
LATER = Moment()  # of a piece that is still being worked on: it is issued by who ends it


class Store(Protocol):
    """Where master and moments rest."""

    def open(self, piece: Piece) -> tuple[list[Tensor], Moment]:
        """Memory of the piece's master and moments, and when it holds them; of a pair's low halves, moments and parameters."""

    def close(self, piece: Piece, changed: Moment | None) -> None:
        """The piece's memory has, after `changed`, new values; None: it is as it was."""

    def shards_of(self, piece: Piece) -> list[Tensor]:
        """Where the piece's parameters rest, by segment."""


class Lane:
    """Two threads: one stages pieces, up to `depth` of them ahead, the other applies them in the same order. `in_turn`: as
    they came, as they are read from a file or make room for the next; else, of those whose gradients are there, first what
    the next forward needs first."""

    def __init__(
        self,
        name: str,
        depth: int,
        worker: "Streamed | Cores",
        *,
        in_turn: bool,
    ):
        self.depth, self.worker, self.in_turn = depth, worker, in_turn
        self.waiting: list[tuple[Job, Piece]] = []
        self.staged: deque[tuple[Job, Piece, Any]] = deque()
        self.news = threading.Condition()
        self.ending = self.ended = False
        self.error: BaseException | None = None
        threads = ((self._stage_all, f"{name}-stage"), (self._apply_all, f"{name}-apply"))
        self.threads = [threading.Thread(target=run, daemon=True, name=name) for run, name in threads]
        for thread in self.threads:
            thread.start()

    def give(self, job: Job, pieces: Sequence[Piece]) -> None:
        with self.news:
            self.waiting += [(job, piece) for piece in pieces]
            self.news.notify_all()

    def close(self) -> None:
        """After all that was given; what waits for a norm that will not come is dropped."""
        with self.news:
            self.ending = True
            for job in [*(w[0] for w in self.waiting), *(s[0] for s in self.staged)]:
                job.go.drop()
            self.news.notify_all()
        for thread in self.threads:
            thread.join()

    def _stage_all(self) -> None:
        with torch.no_grad():
            while (given := self._next()) is not None:
                staged = (*given, self._guard(self.worker.stage, *given))
                with self.news:
                    self.staged.append(staged)
                    self.news.notify_all()
        with self.news:
            self.ended = True
            self.news.notify_all()

    def _next(self) -> tuple[Job, Piece] | None:
        """None: this is the end."""
        with self.news:
            self.news.wait_for(lambda: (self.waiting and len(self.staged) < self.depth) or (self.ending and not self.waiting))
            if not self.waiting:
                return None
            return self.waiting.pop(0 if self.in_turn else self._first())

    def _first(self) -> int:
        """Which one of those that wait. The host runs ahead of the device: what came last may be long in coming."""
        there = {id(job) for job in {id(job): job for job, _ in self.waiting}.values() if job.arrived()}
        ready = [i for i, (job, _) in enumerate(self.waiting) if id(job) in there]
        return min(ready, key=lambda i: self.waiting[i][1].number) if ready else 0

    def _apply_all(self) -> None:
        with torch.no_grad():
            while (first := self._oldest()) is not None:
                moment = self._guard(self.worker.apply, *first)
                with self.news:  # its slot is free for the next to be staged from here on
                    self.staged.popleft()
                    self.news.notify_all()
                if moment is not LATER:
                    first[0].issue(moment or DONE)

    def _oldest(self) -> tuple[Job, Piece, Any] | None:
        with self.news:
            self.news.wait_for(lambda: self.staged or self.ended)
            return self.staged[0] if self.staged else None

    def _guard(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What goes wrong here is raised where the step waits; whoever waits must not wait for ever."""
        if self.error is not None:
            return None
        try:
            return call(*arguments)
        except BaseException as error:
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.worker.release()


class Streamed:
    """The GPU's lane: state up, update, state down. On a CPU the same by copies.

    State goes back by a thread of its own: with many slots, the next updates do not wait for the bus, and a forward that
    waits for them goes on.
    """

    def __init__(self, device: torch.device, rule: Rule, store: Store, slots: list[Slot], bench: Bench, emit: "Emit", bus: Bus):
        self.rule, self.store, self.slots, self.bench, self.emit, self.bus = rule, store, slots, bench, emit, bus
        self.work = Stream(device, first=True)
        self.turn = 0
        self.back = Crew("back", 1 if slots else 0)
        self.returned: dict[int, threading.Event] = {}  # by piece: its state is queued to go back
        self.one_kernel = one_kernel(device, rule) if slots else None
        self.failed: Callable[[BaseException], None] = _raised

    def stage(self, job: Job, piece: Piece) -> tuple[Slot, list[Tensor]]:
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        if piece.number in self.returned:
            self.returned[piece.number].wait()
        slot.idle.wait()
        slot.idle.clear()
        resting, there = self.store.open(piece)
        slot.filled = self.bus.up.send(slot.of(piece), resting, slot.free, there)
        self.bus.moved_up += sum(t.nbytes for t in resting)
        return slot, resting

    def apply(self, job: Job, piece: Piece, staged: tuple[Slot, list[Tensor]]) -> Moment:
        slot, resting = staged
        _, skip = job.go.wait()
        if skip:
            self.store.close(piece, None)
            slot.idle.set()
            return DONE
        with self.work:
            self.work.after(slot.filled, job.ready, job.go.moment)
            update = self._at_once if piece.packed and self.one_kernel is not None else self._by_torch
            new = update(job, piece, slot)
            updated = self.work.moment()
        self.returned[piece.number] = threading.Event()
        self.back.share(self._return, [(piece, slot, resting, updated)], lambda _: None)
        return new

    def _return(self, piece: Piece, slot: Slot, resting: list[Tensor], updated: Moment) -> None:
        try:
            state = resting[: 1 + self.rule.slots]  # the parameters of a pair have gone ahead
            slot.free = self.bus.down.send(state, slot.of(piece)[: len(state)], updated)
            self.bus.moved_down += sum(t.nbytes for t in state)
            self.store.close(piece, slot.free)
        except BaseException as error:
            self.failed(error)
        slot.idle.set()
        self.returned[piece.number].set()

    def release(self) -> None:
        """The lane is broken: nobody may wait for what does not come."""
        for event in (*(slot.idle for slot in self.slots), *self.returned.values()):
            event.set()

    def settle(self) -> None:
        """All state is queued to go back."""
        for event in list(self.returned.values()):
            event.wait()

    def _at_once(self, job: Job, piece: Piece, slot: Slot) -> Moment:
        """The update of a packed piece, each of its segments in one pass."""
        assert self.one_kernel is not None
        for s, (parameters, state) in zip(piece.segments, self._words(piece, slot), strict=True):
            gradient = job.gradients[s.parameter]
            if gradient is not None:
                step, group = job.steps[s.parameter], job.groups[s.parameter]
                part = gradient.reshape(-1) if s.whole else gradient.reshape(-1)[s.start : s.stop]
                self.one_kernel.update_packed(self.rule, part, parameters, state, job.go.scale, step, group)
        job.read()
        return self._out(piece, slot.of(piece)[3]) if piece.paired else self.work.moment()

    def _words(self, piece: Piece, slot: Slot) -> list[tuple[Tensor, list[Tensor]]]:
        """By segment, its parameters and state for the kernel."""
        if piece.number not in slot.words:
            assert self.one_kernel is not None
            staged = slot.of(piece)
            parameters = segment_views(staged[3], piece, flat=True) if piece.paired else self.store.shards_of(piece)
            states = zip(*(segment_views(t, piece, flat=True) for t in staged[:3]), strict=True)
            slot.words[piece.number] = [self.one_kernel.words(*both) for both in zip(parameters, states, strict=True)]
        return slot.words[piece.number]

    def _by_torch(self, job: Job, piece: Piece, slot: Slot) -> Moment:
        """The update by torch's kernels, on the bench."""
        staged, gradient = slot.of(piece), self._gradient(job, piece)
        master, *moments = self._wide(piece, staged)
        for start, stop, index in job.runs(piece):
            part = [t[start:stop] for t in (master, gradient, *moments)]
            apply_rule(self.rule, part[0], part[1], part[2:], job.steps[index], job.groups[index])
        rounded = self._rounded(piece, staged)
        new = self._out(piece, master if rounded is None else rounded.copy_(master))
        if piece.packed:
            assert rounded is not None
            low, _, second = staged[:3]
            pack(master, rounded, low, second)
        return new

    def _gradient(self, job: Job, piece: Piece) -> Tensor:
        job.collect(piece, self.bench.gradients.of(piece))
        job.read()
        gradient = self.bench.gradients.memory[: piece.elements]
        for factor in job.go.scale if job.go.scale is not None else ():
            gradient.mul_(factor.to(gradient.dtype))
        return gradient

    def _wide(self, piece: Piece, staged: list[Tensor]) -> list[Tensor]:
        """Master and moments, as the rule takes them."""
        if not piece.packed:
            return staged
        low, first, second = staged[:3]
        rounded = self._rounded(piece, staged)
        assert self.bench.master is not None
        assert rounded is not None
        master = self.bench.master[: piece.elements]
        if not piece.paired:
            torch._foreach_copy_(segment_views(rounded, piece, flat=True), self.store.shards_of(piece))
        unpack(rounded, low, second, master)
        return [master, first, second]

    def _rounded(self, piece: Piece, staged: list[Tensor]) -> Tensor | None:
        """Memory for a piece's parameters in the compute dtype, where they are wanted in it: they came along, or are copied
        together on the device, or leave it (half the bytes over the bus)."""
        if piece.paired:
            return staged[3]
        if not piece.packed and piece.away.unit.home.params == "device":
            return None
        assert self.bench.rounded is not None
        return self.bench.rounded[: piece.elements]

    def _out(self, piece: Piece, parameters: Tensor) -> Moment:
        """New parameters on their way."""
        if piece.away.unit.home.params != "device":
            self.bus.moved_down += parameters.nbytes
        return self.emit(piece, parameters, self.work)


class Cores:
    """The CPU's lane: the gradient down, the update in place where the state rests, the new parameters up.

    The lane's thread waits for gradients and shares the pieces out to the cores, and another one sends off what they have
    updated: so the cores go on with the next piece while this one's last chunk ends.
    """

    def __init__(
        self,
        device: torch.device,
        rule: Rule,
        store: Store,
        trays: list[Tray],
        emit: "Emit",
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
        self.failed: Callable[[BaseException], None] = _raised

    def stage(self, job: Job, piece: Piece) -> Tray:
        tray = self.trays[self.turn % len(self.trays)]
        self.turn += 1
        tray.idle.wait()
        tray.idle.clear()
        tray.sent.wait()
        if piece.number not in job.drained:
            tray.filled = self.bus.down.send(*job.copies(piece, tray.gradients.of(piece)), job.ready)
            self.bus.moved_down += piece.elements * tray.gradients.memory.itemsize
            job.read()
        return tray

    def apply(self, job: Job, piece: Piece, tray: Tray) -> Moment:
        factors, skip = job.go.wait()
        resting, there = self.store.open(piece)
        if skip:
            self.store.close(piece, None)
            tray.idle.set()
            return DONE
        gradient, filled = job.drained.get(piece.number, (tray.gradients.memory, tray.filled))
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


def one_kernel(device: torch.device, rule: Rule) -> ModuleType | None:
    """The module of that name, where there is Triton, it finds what it needs to compile a kernel for this device, and that
    gives the bits that torch's kernels give."""
    if device.type != "cuda" or rule.kind not in ("adamw", "adam"):
        return None
    try:
        from fullshard.on_torch.away import one_kernel as found

        return found if found.agrees(rule, device) else None
    except Exception:  # as many as there are machines without a compiler; torch's kernels do it
        return None


def _raised(error: BaseException) -> None:
    raise error


class Emit(Protocol):
    """Takes a piece's new parameters, in any dtype, to where its unit's shards rest; queued on `stream`."""

    def __call__(self, piece: Piece, values: Tensor, stream: Stream) -> Moment: ...
