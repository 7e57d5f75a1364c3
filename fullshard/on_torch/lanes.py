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

from fullshard.on_torch.crew import CHUNK, Crew
from fullshard.on_torch.homes import Away, Piece
from fullshard.on_torch.rule import Rule, apply_rule
from fullshard.on_torch.streams import DONE, Moment, Stream

FLYING = 2  # copies of pieces under way in one direction
POSTING = 4  # cores that narrow parameters on their way to host memory
LATER = Moment()  # of a piece that is still being worked on: it is issued by who ends it


class Store(Protocol):
    """Where master and moments rest."""

    def open(self, piece: Piece) -> tuple[list[Tensor], Moment]:
        """Memory of the piece's master and moments, and when it holds them."""

    def close(self, piece: Piece, changed: Moment | None) -> None:
        """The piece's memory has, after `changed`, new values; None: it is as it was."""


class Go:
    """Whether this step's updates happen, and the factors on all gradients; known only late in a step."""

    def __init__(self) -> None:
        self.known = threading.Event()
        self.factors: list[Tensor] = []  # on the device
        self.numbers: Tensor | None = None  # on the host: skip, factors
        self.moment = DONE

    def say(self, factors: list[Tensor], skip: Tensor, device: torch.device) -> None:
        """Queue the news; nobody waits here."""
        self.factors = factors
        found = torch.stack([t.double().reshape(()) for t in (skip, *factors)])
        self.numbers = found.to("cpu", non_blocking=True)  # pinned, from torch's cache: a few bytes
        self.moment = Moment.here(device)
        self.known.set()

    def drop(self) -> None:
        """The step was given up: no update happens."""
        if not self.known.is_set():
            self.numbers = torch.ones(1)
            self.known.set()

    def wait(self) -> tuple[list[float], bool]:
        self.known.wait()
        self.moment.wait()
        assert self.numbers is not None
        skip, *factors = self.numbers.tolist()
        return factors, bool(skip)


@dataclass
class Job:
    """One unit's update in one step."""

    away: Away
    go: Go
    gradients: list[Tensor | None] = field(default_factory=list)
    ready: Moment = DONE  # the gradients are there
    groups: list[dict[str, Any]] = field(default_factory=list)  # the optimizer's settings, by parameter
    steps: list[int] = field(default_factory=list)  # the number of this update, by parameter
    drained: dict[int, tuple[Tensor, Moment]] = field(default_factory=dict)  # gradients on the host already, by piece
    moments: list[Moment] = field(default_factory=list)  # when the parameters of each piece are new
    issued: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    had: list[bool] = field(default_factory=list)  # whether there was a gradient, by parameter
    counted: bool = False
    readers: tuple[Stream, ...] = ()  # that the gradients are read on
    unread: int = 0  # pieces whose gradients are to be read from the device
    dropped: threading.Event = field(default_factory=threading.Event)  # the gradients, after the last was queued to be read
    free: list[Moment] = field(default_factory=list)  # when their memory is there for others

    def issue(self, moment: Moment) -> None:
        """One more piece is queued. After the last, the gradients are let go, if they were not before."""
        with self.lock:
            self.moments.append(moment)
            if len(self.moments) == len(self.away.pieces):
                self._drop()
                self.drained = {}
                self.issued.set()

    def keep(self, *readers: Stream) -> None:
        """FSDP may not have the gradients' memory, one storage for all of a unit's, before these have read it."""
        self.readers, self.unread = readers, len(self.away.pieces) - len(self.drained)
        for g in {g.untyped_storage().data_ptr(): g for g in self.gradients if g is not None}.values():
            for reader in readers:
                reader.keep(g)

    def read(self) -> None:
        """One more piece's gradients are queued to be read. After the last, they are let go."""
        with self.lock:
            self.unread -= 1
            if self.unread == 0:
                self._drop()

    def _drop(self) -> None:
        """The allocator has the memory when the streams that it was kept for are where they are now."""
        if not self.dropped.is_set():
            self.gradients = []
            self.free = [stream.moment() for stream in self.readers]
            self.dropped.set()

    def let_go(self) -> bool:
        """Whether the gradients' memory is there for others."""
        return self.dropped.is_set() and all(moment.done() for moment in self.free)

    def wait_let_go(self) -> None:
        self.dropped.wait()
        for moment in self.free:
            moment.wait()

    def copies(self, piece: Piece, parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What takes the piece's gradients to `parts`, a segment each: targets and sources."""
        targets, sources = [], []
        for s, part in zip(piece.segments, parts, strict=True):
            gradient = self.gradients[s.parameter]
            if gradient is not None:
                targets.append(part)
                sources.append(gradient if s.whole else gradient.view(-1)[s.start : s.stop])
        return targets, sources

    def collect(self, piece: Piece, parts: list[Tensor]) -> None:
        """The piece's gradients to `parts`; queued on the current stream."""
        targets, sources = self.copies(piece, parts)
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def runs(self, piece: Piece) -> list[tuple[int, int, int]]:
        """(start, stop, parameter) of what is updated alike: neighbours of one group with equally many updates."""
        found: list[tuple[int, int, int]] = []
        for s in piece.segments:
            if not self.had[s.parameter]:
                continue
            stop = s.offset + s.stop - s.start
            if found and found[-1][1] == s.offset and self._alike(found[-1][2], s.parameter):
                found[-1] = (found[-1][0], stop, s.parameter)
            else:
                found.append((s.offset, stop, s.parameter))
        return found

    def _alike(self, a: int, b: int) -> bool:
        return self.groups[a] is self.groups[b] and self.steps[a] == self.steps[b]


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


class Wire:
    """One direction of the bus, for both lanes. A copy engine serves what is queued before it looks at another stream, so
    there is one queue, it never holds more than two copies, and none that would have to wait."""

    def __init__(self, device: torch.device):
        self.stream = Stream(device)
        self.turn = threading.Lock()
        self.flying: deque[Moment] = deque()

    def send(self, targets: list[Tensor], sources: list[Tensor], *after: Moment) -> Moment:
        """Copy, once it is `after`; the calling thread waits until it is queued."""
        for moment in after:
            moment.wait()
        with self.turn:
            if len(self.flying) == FLYING:
                self.flying.popleft().wait()
            with self.stream:
                if targets:
                    torch._foreach_copy_(targets, sources, non_blocking=True)
                self.flying.append(self.stream.moment())
            return self.flying[-1]


@dataclass
class Bus:
    """Both directions, and the bytes that the lanes have sent, since the start."""

    up: Wire
    down: Wire
    moved_up: int = 0
    moved_down: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "Bus":
        return cls(Wire(device), Wire(device))


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
            self.post.share(self._send, [(job, piece, master)], self._sent)

    def _sent(self, error: BaseException | None) -> None:
        if error is not None:
            self.failed(error)

    def _send(self, job: Job, piece: Piece, master: Tensor) -> None:
        """New parameters on their way to where the unit's shards rest."""
        new = DONE
        try:
            if piece.away.unit.home.params == "device":
                new = self._by_device(piece, master)
            else:
                new = self.emit(piece, master, None, self.work)
            self.store.close(piece, new)
        finally:
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
