"""A lane of updates, the GPU's (`streamed`) or that of the CPU's cores (`cores`): in which order pieces pass it.

Each lane has a few slots of staging memory. It brings the next piece's bytes while this one is worked on, and tells the
unit's job when the new parameters are queued. Gradients come in, parameters go out; the rest of the step only ever waits
for those.

The interpreter is shared with the thread that queues forward and backward, and every small call here delays a kernel
there: copies of many parts are one call, and views that stay the same are made once.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fullshard.on_torch.offload.events import DONE, Moment, Stream
from fullshard.on_torch.offload.units import Piece
from fullshard.on_torch.offload.updates.unit_update import Job

LATER = Moment()  # of a piece that is still being worked on: it is issued by who ends it


class Store(Protocol):
    """Where master and moments rest."""

    def open(self, piece: Piece) -> tuple[list[Tensor], Moment]:
        """Memory of the piece's master and moments, and when it holds them; of a pair's low halves, moments and parameters."""

    def close(self, piece: Piece, changed: Moment | None) -> None:
        """The piece's memory has, after `changed`, new values; None: it is as it was."""

    def shards_of(self, piece: Piece) -> list[Tensor]:
        """Where the piece's parameters rest, by segment."""


class Emit(Protocol):
    """Takes a piece's new parameters, in any dtype, to where its unit's shards rest; queued on `stream`."""

    def __call__(self, piece: Piece, values: Tensor, stream: Stream) -> Moment: ...


class Worker(Protocol):
    """Who updates a lane's pieces: first one is staged, then, later and on another thread, it is applied."""

    def stage(self, job: Job, piece: Piece) -> Any: ...

    def apply(self, job: Job, piece: Piece, staged: Any) -> Moment:
        """When the new parameters are there; LATER: the worker says so itself."""

    def release(self) -> None:
        """The lane is broken: nobody may wait for what does not come."""


class Lane:
    """Two threads: one stages pieces, up to `depth` of them ahead, the other applies them in the same order. `in_turn`: as
    they came, as they are read from a file or make room for the next; else, of those whose gradients are there, first what
    the next forward needs first."""

    def __init__(self, name: str, depth: int, worker: Worker, *, in_turn: bool):
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


def unheard(error: BaseException) -> None:
    """What a worker does with an error before it has a lane."""
    raise error
