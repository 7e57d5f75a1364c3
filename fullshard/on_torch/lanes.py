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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fullshard.on_torch.bus import Bus
from fullshard.on_torch.crew import CHUNK, Crew
from fullshard.on_torch.homes import Piece
from fullshard.on_torch.jobs import Job
from fullshard.on_torch.rule import Rule, apply_rule
from fullshard.on_torch.streams import DONE, Moment, Stream

POSTING = 4  # cores that narrow parameters on their way to host memory
LATER = Moment()  # of a piece that is still being worked on: it is issued by who ends it


class Store(Protocol):
    """Where master and moments rest."""

    def open(self, piece: Piece) -> tuple[list[Tensor], Moment]:
        """Memory of the piece's master and moments, and when it holds them."""

    def close(self, piece: Piece, changed: Moment | None) -> None:
        """The piece's memory has, after `changed`, new values; None: it is as it was."""


class Lane:
    """Two threads: one stages pieces, up to `depth` of them ahead, the other applies them in the same order. `in_turn`: as
    they came, as they are read from a file or make room for the next; else, of those whose gradients are there, first what
    the next forward needs first."""

    def __init__(
        self,
        name: str,
        depth: int,
        stage: Callable[[Job, Piece], Any],
        apply: Callable[[Job, Piece, Any], Moment],
        *,
        in_turn: bool,
    ):
        self.depth, self.stage, self.apply, self.in_turn = depth, stage, apply, in_turn
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
                staged = (*given, self._guard(self.stage, *given))
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
        there = {id(job): job.ready.done() for job, _ in self.waiting}
        ready = [i for i, (job, _) in enumerate(self.waiting) if there[id(job)]]
        return min(ready, key=lambda i: self.waiting[i][1].number) if ready else 0

    def _apply_all(self) -> None:
        with torch.no_grad():
            while (first := self._oldest()) is not None:
                moment = self._guard(self.apply, *first)
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
            self.error = error
            return None


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class Slot:
    """Staging memory for one piece; free again after `free`."""

    state: list[Tensor]
    gradient: Tensor
    out: Tensor | None = None
    free: Moment = DONE
    filled: Moment = DONE
    idle: threading.Event = field(default_factory=_set)  # no core works in it
    views: dict[int, "Views"] = field(default_factory=dict)  # by piece

    def of(self, piece: Piece) -> "Views":
        if piece.number not in self.views:
            n = piece.elements
            out = None if self.out is None else self.out[:n]
            gradients = segment_views(self.gradient, piece)
            self.views[piece.number] = Views([t[:n] for t in self.state], self.gradient[:n], gradients, out)
        return self.views[piece.number]


@dataclass
class Views:
    """What of a slot a piece takes up."""

    state: list[Tensor]
    gradient: Tensor
    gradients: list[Tensor]  # by segment
    out: Tensor | None


def segment_views(flat: Tensor, piece: Piece) -> list[Tensor]:
    """A piece's segments in flat memory; whole parameters in their own shape, so that gradients are copied as they come."""
    found = [flat[s.offset : s.offset + s.stop - s.start] for s in piece.segments]
    return [part.view(s.shape) if s.whole else part for part, s in zip(found, piece.segments, strict=True)]


class Streamed:
    """The GPU's lane: state up, update, state down. On a CPU the same by copies."""

    def __init__(self, device: torch.device, rule: Rule, store: Store, slots: list[Slot], emit: "Emit", bus: Bus):
        self.rule, self.store, self.slots, self.emit, self.bus = rule, store, slots, emit, bus
        self.work = Stream(device, first=True)
        self.turn = 0

    def stage(self, job: Job, piece: Piece) -> tuple[Slot, list[Tensor]]:
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        resting, there = self.store.open(piece)
        slot.filled = self.bus.up.send(slot.of(piece).state, resting, slot.free, there)
        self.bus.moved_up += sum(t.nbytes for t in resting)
        return slot, resting

    def apply(self, job: Job, piece: Piece, staged: tuple[Slot, list[Tensor]]) -> Moment:
        slot, resting = staged
        _, skip = job.go.wait()
        if skip:
            self.store.close(piece, None)
            return DONE
        views = slot.of(piece)
        with self.work:
            self.work.after(slot.filled, job.ready, job.go.moment)
            job.collect(piece, views.gradients)
            job.read()
            for factor in job.go.factors:
                views.gradient.mul_(factor.to(slot.gradient.dtype))
            for start, stop, index in job.runs(piece):
                part = [t[start:stop] for t in views.state]
                gradient = views.gradient[start:stop]
                apply_rule(self.rule, part[0], gradient, part[1:], job.steps[index], job.groups[index])
            new = self.emit(piece, views.state[0], slot.out, self.work)
            updated = self.work.moment()
        slot.free = self.bus.down.send(resting, views.state, updated)
        self.bus.moved_down += sum(t.nbytes for t in resting)
        self.store.close(piece, slot.free)
        return new


class Cores:
    """The CPU's lane: the gradient down, the update in place where the state rests, the new master up.

    The lane's thread waits for gradients and shares the pieces out to the cores, and another one sends off what they have
    updated: so the cores go on with the next piece while this one's last chunk ends. `outs`: memory of the device that a
    new master comes to, to be narrowed there: the cores are scarcer than the bus.
    """

    def __init__(
        self,
        device: torch.device,
        rule: Rule,
        store: Store,
        slots: list[Slot],
        outs: list[Tensor],
        emit: "Emit",
        bus: Bus,
        *,
        threads: int,
    ):
        self.rule, self.store, self.slots, self.outs, self.emit, self.bus = rule, store, slots, outs, emit, bus
        self.work = Stream(device, first=True)
        self.narrowed = [DONE] * len(outs)  # when each of `outs` may be written to again
        self.turn = self.sent = 0
        self.crew, self.post = Crew("cores", threads if slots else 0), Crew("post", 1 if slots else 0, cores=POSTING)
        self.depth = max(1, len(slots) // 2)  # of the slots, those that gradients come to; in the others cores work
        self.failed: Callable[[BaseException], None] = _raised

    def stage(self, job: Job, piece: Piece) -> Slot:
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        slot.idle.wait()
        slot.idle.clear()
        if piece.number not in job.drained:
            slot.filled = self.bus.down.send(*job.copies(piece, slot.of(piece).gradients), job.ready)
            self.bus.moved_down += slot.of(piece).gradient.nbytes
            job.read()
        return slot

    def apply(self, job: Job, piece: Piece, slot: Slot) -> Moment:
        factors, skip = job.go.wait()
        resting, there = self.store.open(piece)
        if skip:
            self.store.close(piece, None)
            slot.idle.set()
            return DONE
        gradient, filled = job.drained.get(piece.number, (slot.gradient, slot.filled))
        for moment in (filled, there):
            moment.wait()
        work = partial(self._chunk, job, resting, gradient, [f for f in factors if f != 1.0])
        chunks = [(a, min(a + CHUNK, stop), i) for start, stop, i in job.runs(piece) for a in range(start, stop, CHUNK)]
        self.crew.share(work, chunks, partial(self._updated, job, piece, slot, resting[0]))
        return LATER

    def _chunk(
        self, job: Job, resting: list[Tensor], gradient: Tensor, factors: list[float], start: int, stop: int, index: int
    ) -> None:
        own = gradient[start:stop].to(resting[0].dtype)
        for factor in factors:
            own.mul_(factor)
        master, *moments = [t[start:stop] for t in resting]
        apply_rule(self.rule, master, own, moments, job.steps[index], job.groups[index])

    def _updated(self, job: Job, piece: Piece, slot: Slot, master: Tensor, error: BaseException | None) -> None:
        slot.idle.set()
        if error is not None:
            self.failed(error)
            job.issue(DONE)
        else:
            self.post.share(self._send, [(job, piece, master)], lambda _: None)

    def _send(self, job: Job, piece: Piece, master: Tensor) -> None:
        """New parameters on their way to where the unit's shards rest."""
        new = DONE
        try:
            if piece.away.unit.home.params == "device":
                new = self._by_device(piece, master)
            else:
                new = self.emit(piece, master, None, self.work)
            self.store.close(piece, new)
        except BaseException as error:
            self.failed(error)  # before anybody goes on who waits for the piece
        job.issue(new)

    def _by_device(self, piece: Piece, master: Tensor) -> Moment:
        turn = self.sent % len(self.outs)
        self.sent += 1
        out = self.outs[turn][: piece.elements]
        self.work.after(self.bus.up.send([out], [master], self.narrowed[turn]))
        self.bus.moved_up += out.nbytes
        with self.work:
            self.narrowed[turn] = self.emit(piece, out, None, self.work)
        return self.narrowed[turn]


def _raised(error: BaseException) -> None:
    raise error


class Emit(Protocol):
    """Takes a piece's new parameters, in any dtype, to where its unit's shards rest; queued on `stream`. `out`: memory to
    narrow them in on the way from the device."""

    def __call__(self, piece: Piece, values: Tensor, out: Tensor | None, stream: Stream) -> Moment: ...
