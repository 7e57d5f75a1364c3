"""Who updates a piece of an away unit: the GPU, with the state streamed past it, or the CPU's cores, where it rests.

Each lane is a thread with a few slots of staging memory. It brings the next piece's bytes while it works on this one's,
and tells the unit's job when the new parameters are queued. Gradients come in, parameters go out; the rest of the step
only ever waits for those.
"""

import itertools
import queue
import sys
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
    had: list[bool] = field(default_factory=list)  # whether there was a gradient, by parameter
    counted: bool = False

    def issue(self, moment: Moment) -> None:
        """One more piece is queued. After the last, the gradients are let go."""
        with self.lock:
            self.moments.append(moment)
            if len(self.moments) == len(self.away.pieces):
                self.gradients, self.drained = [], {}
                self.issued.set()

    def collect(self, piece: Piece, into: Tensor) -> None:
        """The piece's gradients, one after the other. Queued on the current stream."""
        for s in piece.segments:
            gradient = self.gradients[s.parameter]
            if gradient is not None:
                target = into[s.offset : s.offset + s.stop - s.start]
                target.copy_(gradient.reshape(-1)[s.start : s.stop], non_blocking=True)

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
    """A thread that stages and applies pieces: of those that wait, the one that the next forward needs first, or, where
    they are read ahead from a file (`in_turn`), in the order in which they came."""

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
        self.waiting: queue.PriorityQueue[tuple[int, int, Job | None, Piece | None]] = queue.PriorityQueue()
        self.given = itertools.count()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True, name=name)
        self.thread.start()

    def give(self, job: Job, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self.waiting.put((0 if self.in_turn else piece.number, next(self.given), job, piece))

    def close(self) -> None:
        self.waiting.put((sys.maxsize, 0, None, None))
        self.thread.join()

    def _run(self) -> None:
        staged: deque[tuple[Job, Piece, Any]] = deque()
        with torch.no_grad():
            while True:
                job, piece = self._next(block=not staged)
                if job is None and not staged:
                    return
                if job is not None and piece is not None:
                    staged.append((job, piece, self._guard(job, self.stage, job, piece)))
                if job is None or len(staged) == self.depth:
                    job, piece, slot = staged.popleft()
                    job.issue(self._guard(job, self.apply, job, piece, slot) or DONE)

    def _next(self, block: bool) -> tuple[Job | None, Piece | None]:
        """(None, None): nothing waits, or this is the end."""
        try:
            return self.waiting.get(block=block)[2:]
        except queue.Empty:
            return None, None

    def _guard(self, job: Job, call: Callable[..., Any], *arguments: Any) -> Any:
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


class Streamed:
    """The GPU's lane: state up, update, state down, on three streams. On a CPU the same by copies."""

    def __init__(self, device: torch.device, rule: Rule, store: Store, slots: list[Slot], emit: "Emit"):
        self.rule, self.store, self.slots, self.emit = rule, store, slots, emit
        self.up, self.work, self.down = Stream(device), Stream(device, first=True), Stream(device)
        self.turn = 0

    def stage(self, job: Job, piece: Piece) -> tuple[Slot, list[Tensor]]:
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        resting, there = self.store.open(piece)
        with self.up:
            self.up.after(slot.free, there)
            for target, source in zip(slot.state, resting, strict=True):
                target[: piece.elements].copy_(source, non_blocking=True)
            slot.filled = self.up.moment()
        return slot, resting

    def apply(self, job: Job, piece: Piece, staged: tuple[Slot, list[Tensor]]) -> Moment:
        slot, resting = staged
        _, skip = job.go.wait()
        if skip:
            self.store.close(piece, None)
            return DONE
        state = [t[: piece.elements] for t in slot.state]
        with self.work:
            self.work.after(slot.filled, job.ready, job.go.moment)
            job.collect(piece, slot.gradient)
            for factor in job.go.factors:
                slot.gradient[: piece.elements].mul_(factor.to(slot.gradient.dtype))
            for start, stop, index in job.runs(piece):
                part = [t[start:stop] for t in state]
                gradient = slot.gradient[start:stop]
                apply_rule(self.rule, part[0], gradient, part[1:], job.steps[index], job.groups[index])
            new = self.emit(piece, state[0], slot, self.work)
            updated = self.work.moment()
        with self.down:
            self.down.after(updated)
            for target, source in zip(resting, state, strict=True):
                target.copy_(source, non_blocking=True)
            slot.free = self.down.moment()
        self.store.close(piece, slot.free)
        return new


class Cores:
    """The CPU's lane: the gradient down, the update in place where the state rests, the new parameters up."""

    def __init__(self, device: torch.device, rule: Rule, store: Store, slots: list[Slot], emit: "Emit", threads: int):
        self.rule, self.store, self.slots, self.emit, self.threads = rule, store, slots, emit, threads
        self.down, self.up = Stream(device), Stream(device)
        self.turn = 0

    def stage(self, job: Job, piece: Piece) -> Slot:
        if self.turn == 0 and self.threads:
            torch.set_num_threads(self.threads)  # of this thread's own pool
        slot = self.slots[self.turn % len(self.slots)]
        self.turn += 1
        if piece.number not in job.drained:
            with self.down:
                self.down.after(job.ready)
                job.collect(piece, slot.gradient)
                slot.filled = self.down.moment()
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
        slot.free.wait()
        assert slot.out is not None
        chunk = piece.elements if gradient.dtype == resting[0].dtype else CHUNK
        for start, stop, index in job.runs(piece):
            for a in range(start, stop, chunk):
                part = slice(a, min(a + chunk, stop))
                own = gradient[part].to(resting[0].dtype)
                for factor in factors:
                    if factor != 1.0:  # a pass over memory for nothing
                        own.mul_(factor)
                apply_rule(self.rule, resting[0][part], own, [m[part] for m in resting[1:]], job.steps[index], job.groups[index])
                slot.out[part].copy_(resting[0][part])
        self.store.close(piece, DONE)
        with self.up:
            slot.free = new = self.emit(piece, slot.out, slot, self.up)
        return new


class Emit(Protocol):
    """Takes a piece's new parameters, in any dtype, to where its unit's shards rest; queued on `stream`."""

    def __call__(self, piece: Piece, values: Tensor, slot: Slot, stream: Stream) -> Moment: ...
