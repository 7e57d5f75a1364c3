"""A lane of updates, the GPU's (`gpu`) or the CPU's (`cpu`): its queue and the order of its pieces.

A lane stages the next pieces while it updates one, and tells the unit's update when new parameters are queued.

Its threads share the interpreter with the thread that queues forward and backward, where every small call here delays a
kernel. So copies of many tensors are one call, and views are made once.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fullshard.on_torch.offload.units.offloaded_unit import Piece
from fullshard.on_torch.offload.units.unit_update import UnitUpdate
from fullshard.on_torch.offload.updates.worker_threads import WorkerThreads
from fullshard.on_torch.tensors.streams import DONE, StreamEvent

LATER = StreamEvent()  # returned for a piece that is still being updated: the worker issues it later


class Worker(Protocol):
    """Updates a lane's pieces: `stage` copies one in, `apply` updates it later on another thread."""

    def stage(self, update: UnitUpdate, piece: Piece) -> Any: ...

    def apply(self, update: UnitUpdate, piece: Piece, staged: Any) -> StreamEvent:
        """The event of the new parameters, or LATER if the worker issues it itself."""

    def release(self) -> None:
        """The lane has failed: wake whoever waits for its memory."""


class UpdateLane:
    """Two threads: one stages pieces, up to `depth` ahead, the other applies them in the same order. `in_turn`: in the order
    in which they were given. Otherwise, of those whose gradients are there, the one that the next forward needs first."""

    def __init__(self, name: str, depth: int, worker: Worker, *, in_turn: bool):
        self.depth, self.worker, self.in_turn = depth, worker, in_turn
        self.waiting: list[tuple[UnitUpdate, Piece]] = []
        self.staged: deque[tuple[UnitUpdate, Piece, Any]] = deque()
        self.changed = threading.Condition()
        self.ending = self.ended = False
        self.error: BaseException | None = None
        threads = ((self._stage_all, f"{name}-stage"), (self._apply_all, f"{name}-apply"))
        self.threads = [threading.Thread(target=run, daemon=True, name=name) for run, name in threads]
        for thread in self.threads:
            thread.start()

    def give(self, update: UnitUpdate, pieces: Sequence[Piece]) -> None:
        with self.changed:
            self.waiting += [(update, piece) for piece in pieces]
            self.changed.notify_all()

    def close(self) -> None:
        """Finish all updates and end the threads. Updates whose norm will not come are cancelled."""
        with self.changed:
            self.ending = True
            for update in [*(w[0] for w in self.waiting), *(s[0] for s in self.staged)]:
                update.decision.cancel()
            self.changed.notify_all()
        for thread in self.threads:
            thread.join()

    def _stage_all(self) -> None:
        with torch.no_grad():
            while (given := self._next()) is not None:
                staged = (*given, self._guard(self.worker.stage, *given))
                with self.changed:
                    self.staged.append(staged)
                    self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def _next(self) -> tuple[UnitUpdate, Piece] | None:
        """The next piece to stage; None at the end."""
        with self.changed:
            self.changed.wait_for(lambda: (self.waiting and len(self.staged) < self.depth) or (self.ending and not self.waiting))
            if not self.waiting:
                return None
            return self.waiting.pop(0 if self.in_turn else self._first())

    def _first(self) -> int:
        """The index of the piece to stage: of those whose gradients are there, the one that forward needs first."""
        there = {id(update) for update in {id(update): update for update, _ in self.waiting}.values() if update.arrived()}
        ready = [i for i, (update, _) in enumerate(self.waiting) if id(update) in there]
        return min(ready, key=lambda i: self.waiting[i][1].number) if ready else 0

    def _apply_all(self) -> None:
        with torch.no_grad():
            while (first := self._oldest()) is not None:
                event = self._guard(self.worker.apply, *first)
                with self.changed:  # the next piece may use its slot from here on
                    self.staged.popleft()
                    self.changed.notify_all()
                if event is not LATER:
                    first[0].issue(event or DONE)

    def _oldest(self) -> tuple[UnitUpdate, Piece, Any] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.staged or self.ended)
            return self.staged[0] if self.staged else None

    def _guard(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call, and keep an error for the step to raise. After an error nothing is called any more."""
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


def skip(piece: Piece) -> None:
    """The step is skipped: the piece's state and parameters stay as they are."""
    piece.unit.shards.skip(piece)
    piece.unit.state.close(piece, None)


def raise_now(error: BaseException) -> None:
    """What an updater does with an error before it has a lane."""
    raise error


def close_all(*threads: UpdateLane | WorkerThreads) -> None:
    for each in threads:
        each.close()
