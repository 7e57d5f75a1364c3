"""The watchdog of a run: a thread on each rank that finds out who waits for whom when nothing goes on, and ends the run.

A collective waits silently for a missing rank until torch's timeout of half an hour. No Python signal handler runs meanwhile,
since those run between instructions of the main thread. The watchdog runs in its own thread and reads signals from a file
descriptor that the C handler writes to.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from fullshard.engine import WatchedRanks, Where
from fullshard.errors import HUNG
from fullshard.runs.heartbeat import Heartbeat

T = TypeVar("T")
TICK = 0.25  # seconds between looks
GAP = 5.0  # of which a stopped or suspended process may have had many without knowing
STEPS = 10  # a run is not called hung before this many steps' time
FIRST = 3  # times `hang_seconds` for the first step, which compiles, connects and checks
COMPILING = 6  # the same where blocks are compiled
ASKED = 3  # steps' time that a run has to reach a step boundary after a signal
AT_ONCE = 5.0  # seconds, at least, for that; and for a second signal
SAVING = 7200.0  # seconds that a checkpoint may take: a slow disk is no hang
ANSWERS = 10.0  # seconds for the ranks' reports


@dataclass
class Progress:
    """What the main thread is doing, for how long it may, and for how long it has. None: derived from the step time."""

    doing: str
    limit: float | None = None  # seconds
    asked: float | None = None
    idle: float = 0.0


class Watchdog:
    """Watches one rank. `seconds`: see `train.hang_seconds`; with 0 it only handles signals. `heartbeat`: tells about the
    rank meanwhile."""

    def __init__(
        self, ranks: WatchedRanks, seconds: float, directory: Path, *, compiles: bool, heartbeat: Heartbeat | None = None
    ):
        self.ranks, self.seconds, self.directory = ranks, seconds, directory
        self.first = (COMPILING if compiles else FIRST) * seconds
        self.progress = Progress("the start", SAVING, 2 * AT_ONCE)
        self.heartbeat, self.step = heartbeat, 0  # the step under way
        self.took: deque[float] = deque(maxlen=16)  # seconds of the newest steps
        self.signals: list[int] = []
        self.ending = threading.Event()

    def __enter__(self) -> Self:
        self.read, self.write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.wakeup = signal.set_wakeup_fd(self.write, warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ending.set()
        self.thread.join()
        self._tell(ended=True)
        signal.set_wakeup_fd(self.wakeup)
        faulthandler.cancel_dump_traceback_later()
        os.close(self.read)
        os.close(self.write)

    # -- told by the main thread -----------------------------------------------------------------------

    def begin(self, step: int) -> None:
        self.step = step
        self.progress = Progress(f"step {step}")
        if limit := self._limit():  # where a thread cannot run, because the main one holds the interpreter, this one can
            faulthandler.dump_traceback_later(2 * limit + ANSWERS, exit=True, file=sys.__stderr__ or 2)

    def end(self, seconds: float) -> None:
        """A step is done."""
        self.took.append(seconds)

    @contextmanager
    def saving(self, doing: str = "saving a checkpoint") -> Iterator[None]:
        """Inside, a checkpoint is written or waited for, or something else goes on that takes as long."""
        before = self.progress
        self.progress = Progress(doing, SAVING, SAVING)
        faulthandler.cancel_dump_traceback_later()
        yield
        before.idle = 0.0
        self.progress = before

    def each(self, items: Iterable[T], doing: str) -> Iterator[T]:
        """Yield the items; taking one counts as progress."""
        for item in items:
            self.progress = Progress(doing)
            yield item

    # -- the thread ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        last = time.monotonic()
        while not self.ending.wait(TICK):
            now = time.monotonic()
            self.progress.idle += min(now - last, GAP)
            last = now
            self._hear()
            self._tell()
            limit = self._limit()
            if self.signals and self.progress.idle > self._patience():
                self._end(128 + self.signals[0])
            elif limit and self.progress.idle > limit:
                self._end(HUNG)

    def _tell(self, *, ended: bool = False) -> None:
        if self.heartbeat:
            took = self.took[-1] if self.took else None
            now = self.progress
            self.heartbeat.beat(step=self.step, doing=now.doing, idle=now.idle, step_seconds=took, ended=ended)

    def _hear(self) -> None:
        try:
            self.signals += [n for n in os.read(self.read, 64) if n in (signal.SIGTERM, signal.SIGINT)]
        except BlockingIOError:
            return

    def _limit(self) -> float | None:
        """Seconds that the current work may take; None: no limit."""
        if not self.seconds:
            return None
        if self.progress.limit is not None:
            return max(self.progress.limit, self.seconds)
        return max(self.seconds, STEPS * max(self.took)) if self.took else self.first

    def _patience(self) -> float:
        """Seconds that the current work may take after a signal."""
        if len(self.signals) > 1:
            return AT_ONCE
        if self.progress.asked is not None:
            return self.progress.asked
        return max(AT_ONCE, ASKED * max(self.took)) if self.took else 2 * AT_ONCE

    def _end(self, code: int) -> None:
        """Find out who waits for whom, print it, and exit; the main thread cannot."""
        idle, own = self.progress.idle, self.ranks.where() | {"doing": self.progress.doing}
        answers = self.ranks.exchange(own, ANSWERS)
        self._leave_stacks()
        if self.ranks.rank == min(answers):
            absent = [self.ranks.absent(r) for r in range(self.ranks.world) if r not in answers]
            print(f"error: {explain_hang(answers, absent, idle)}; stacks are in {self.directory}", file=sys.stderr, flush=True)
        os._exit(code)

    def _leave_stacks(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / f"rank-{self.ranks.rank:05d}.txt").write_text(self.ranks.stacks())
        except OSError as error:
            print(f"the stacks of rank {self.ranks.rank} were not written: {error.strerror}", file=sys.stderr)


# -- words --------------------------------------------------------------------------------------------------


def explain_hang(answers: dict[int, Where], absent: list[str], idle: float) -> str:
    """Which ranks wait in which collective of which unit, and where the missing ones are."""
    late = {r: a for r, a in sorted(answers.items()) if not a["waits"]}
    if not (late or absent):  # all are in a collective: in different ones, if one has entered fewer
        entered = max(a["count"] for a in answers.values())
        late = {r: a for r, a in sorted(answers.items()) if a["count"] < entered}
    waiting = {r: a for r, a in answers.items() if r not in late}
    parts = [f"{_ranks(ranks)} in {place}" for place, ranks in _grouped(waiting).items()]
    parts += [f"rank {r} did not come: it is in {a['line']} during {a['doing']}" for r, a in late.items()]
    return f"nothing went on for {idle:.0f} s in {answers[min(answers)]['doing']}: {'; '.join(parts + absent)}"


def _grouped(waiting: dict[int, Where]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, a in sorted(waiting.items()):
        what = f"the {a['collective']}" if a["collective"] else a["line"]
        found.setdefault(f"{what} of unit {a['unit']}" if a["unit"] else what, []).append(rank)
    return found


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown} wait" if len(ranks) > 1 else f"rank {shown} waits"
