"""Who updates a piece of an away unit: the GPU, with the state streamed past it, or the CPU's cores, where it rests.

Each lane is a thread with a few slots of staging memory. It brings the next piece's bytes while it works on this one's,
and tells the unit's job when the new parameters are queued. Gradients come in, parameters go out; the rest of the step
only ever waits for those.

The interpreter is shared with the thread that queues forward and backward, and every small call here delays a kernel
there: copies of many parts are one call, and views that stay the same are made once.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fullshard.on_torch.homes import Away, Piece
from fullshard.on_torch.rule import Rule, apply_rule
from fullshard.on_torch.streams import DONE, Moment, Stream

FLYING = 3  # pieces under way in one direction: the bus serves copies in their order, and the other lane's are small
CHUNK = 1 << 22  # elements of a narrow gradient that are widened at once, so that the wide copy stays in the caches


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
    now: bool = False  # gradients are fetched while updates run: the bus must have room for them
    had: list[bool] = field(default_factory=list)  # whether there was a gradient, by parameter
    counted: bool = False

    def issue(self, moment: Moment) -> None:
        """One more piece is queued. After the last, the gradients are let go."""
        with self.lock:
            self.moments.append(moment)
            if len(self.moments) == len(self.away.pieces):
                self.gradients, self.drained = [], {}
                self.issued.set()

    def collect(self, piece: Piece, parts: list[Tensor]) -> None:
        """The piece's gradients to `parts`, a segment each. Queued on the current stream."""
        targets, sources = [], []
        for s, part in zip(piece.segments, parts, strict=True):
            gradient = self.gradients[s.parameter]
            if gradient is not None:
                targets.append(part)
                sources.append(gradient if s.whole else gradient.view(-1)[s.start : s.stop])
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
    """A thread that stages and applies pieces. `in_turn`: in the order in which they came, as they are read from a file;
    else, of those whose gradients are there, the one that the next forward needs first."""

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
        self.news = threading.Condition()
        self.ending = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True, name=name)
        self.thread.start()

    def give(self, job: Job, pieces: Sequence[Piece]) -> None:
        with self.news:
            self.waiting += [(job, piece) for piece in pieces]
            self.news.notify()

    def close(self) -> None:
        with self.news:
            self.ending = True
            self.news.notify()
        self.thread.join()

    def _run(self) -> None:
        staged: deque[tuple[Job, Piece, Any]] = deque()
        with torch.no_grad():
            while True:
                given = self._next(block=not staged)
                if given is None and not staged:
                    return
                if given is not None:
                    staged.append((*given, self._guard(self.stage, *given)))
                if given is None or len(staged) == self.depth:
                    job, piece, slot = staged.popleft()
                    job.issue(self._guard(self.apply, job, piece, slot) or DONE)

    def _next(self, block: bool) -> tuple[Job, Piece] | None:
        """None: nothing waits, and if that was waited for, this is the end."""
        with self.news:
            if block:
                self.news.wait_for(lambda: self.waiting or self.ending)
            if not self.waiting:
                return None
            return self.waiting.pop(0 if self.in_turn else self._first())

    def _first(self) -> int:
        """Which one of those that wait. The host runs ahead of the device: what came last may be long in coming."""
        there = {id(job): job.ready.done() for job, _ in self.waiting}
        ready = [i for i, (job, _) in enumerate(self.waiting) if there[id(job)]]
        return min(ready, key=lambda i: self.waiting[i][1].number) if ready else 0

    def _guard(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What goes wrong here is raised where the step waits; whoever waits must not wait for ever."""
        if self.error is not None:
            return None
        try:
            return call(*arguments)
        except BaseException as error:
            self.error = error
            return None


@dataclass
class Slot:
    """Staging memory for one piece; free again after `free`."""

    state: list[Tensor]
    gradient: Tensor
    out: Tensor | None = None
    free: Moment = DONE
    filled: Moment = DONE
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


@dataclass
class Moved:
    """Bytes that a lane has taken to the device and from it, since the start."""

    up: int = 0
    down: int = 0


class Streamed:
    """The GPU's lane: state up, update, state down, on three streams. On a CPU the same by copies."""

    def __init__(self, device: torch.device, rule: Rule, store: Store, slots: list[Slot], emit: "Emit"):
        self.rule, self.store, self.slots, self.emit = rule, store, slots, emit
        self.up, self.work, self.down = Stream(device), Stream(device, first=True), Stream(device)
        self.turn = 0
        self.moved = Moved()
        self.rising: deque[Moment] = deque(maxlen=FLYING)
        self.falling: deque[Moment] = deque(maxlen=FLYING)

    def stage(self, job: Job, piece: Piece) -> tuple[Slot, list[Tensor]]:
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        resting, there = self.store.open(piece)
        _hold(self.rising)
        with self.up:
            self.up.after(slot.free, there)
            torch._foreach_copy_(slot.of(piece).state, resting, non_blocking=True)
            slot.filled = self.up.moment()
        self.moved.up += sum(t.nbytes for t in resting)
        self.rising.append(slot.filled)
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
            for factor in job.go.factors:
                views.gradient.mul_(factor.to(slot.gradient.dtype))
            for start, stop, index in job.runs(piece):
                part = [t[start:stop] for t in views.state]
                gradient = views.gradient[start:stop]
                apply_rule(self.rule, part[0], gradient, part[1:], job.steps[index], job.groups[index])
            new = self.emit(piece, views.state[0], slot.out, self.work)
            updated = self.work.moment()
        if job.now:
            _hold(self.falling)
        with self.down:
            self.down.after(updated)
            torch._foreach_copy_(resting, views.state, non_blocking=True)
            slot.free = self.down.moment()
        self.moved.down += sum(t.nbytes for t in resting)
        self.falling.append(slot.free)
        self.store.close(piece, slot.free)
        return new


def _hold(flying: deque[Moment]) -> None:
    """Wait until not more than FLYING copies are under way with the next one."""
    if len(flying) == FLYING:
        flying[0].wait()


class Cores:
    """The CPU's lane: the gradient down, the update in place where the state rests, the new master up."""

    def __init__(self, device: torch.device, rule: Rule, store: Store, slots: list[Slot], emit: "Emit", *, threads: int):
        self.rule, self.store, self.slots, self.emit, self.threads = rule, store, slots, emit, threads
        self.down, self.up = Stream(device), Stream(device)
        self.moved = Moved()
        self.turn = 0

    def stage(self, job: Job, piece: Piece) -> Slot:
        if self.turn == 0:
            torch.set_num_threads(self.threads)  # of this thread's own pool
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        if piece.number not in job.drained:
            with self.down:
                self.down.after(job.ready)
                job.collect(piece, slot.of(piece).gradients)
                slot.filled = self.down.moment()
            self.moved.down += slot.of(piece).gradient.nbytes
        return slot

    def apply(self, job: Job, piece: Piece, slot: Slot) -> Moment:
        factors, skip = job.go.wait()
        resting, there = self.store.open(piece)
        if skip:
            self.store.close(piece, None)
            return DONE
        gradient, filled = job.drained.get(piece.number, (slot.gradient, slot.filled))
        filled.wait()
        there.wait()
        chunk = piece.elements if gradient.dtype == resting[0].dtype else CHUNK
        for start, stop, index in job.runs(piece):
            for a in range(start, stop, chunk):
                part = slice(a, min(a + chunk, stop))
                own = gradient[part].to(resting[0].dtype)
                for factor in factors:
                    if factor != 1.0:  # a pass over memory for nothing
                        own.mul_(factor)
                apply_rule(self.rule, resting[0][part], own, [m[part] for m in resting[1:]], job.steps[index], job.groups[index])
        with self.up:
            wide = resting[0]
            if piece.away.unit.home.params == "device":  # narrowed there: the cores are scarcer than the bus
                assert slot.out is not None
                wide = slot.out[: piece.elements].copy_(wide, non_blocking=True)
                self.moved.up += wide.nbytes
            new = self.emit(piece, wide, None, self.up)
        self.store.close(piece, new)
        return new


class Emit(Protocol):
    """Takes a piece's new parameters, in any dtype, to where its unit's shards rest; queued on `stream`. `out`: memory to
    narrow them in on the way from the device."""

    def __call__(self, piece: Piece, values: Tensor, out: Tensor | None, stream: Stream) -> Moment: ...
