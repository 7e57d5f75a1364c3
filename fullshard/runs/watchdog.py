"""The watchdog of a run: a thread on each rank that finds out who waits for whom when nothing goes on, and ends the run.

A collective waits silently for a missing rank until torch's timeout of half an hour. No Python signal handler runs meanwhile,
since those run between instructions of the main thread. The watchdog runs in its own thread and reads signals from a file
descriptor that the C handler writes to.

The run's directory may be on a file system that does not answer. So neither thread that watches touches a file: a third one
does, and for how long it has been waiting tells whether the directory answers.
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
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from fullshard.base.errors import HUNG, code_of_signal
from fullshard.base.text import first_of
from fullshard.ranks.hang_reports import OneRank, call_with_timeout
from fullshard.ranks.rank_protocols import WatchedRanks, Where
from fullshard.runs.disk_thread import DiskThread
from fullshard.runs.heartbeat import EVERY, Heartbeat
from fullshard.runs.stop_signals import ASKING

T = TypeVar("T")
TICK = 0.25  # seconds between looks
GAP = 5.0  # of which a stopped or suspended process may have had many without knowing
STEPS = 10  # a run is not called hung before this many steps' time
FIRST = 3  # times `hang_seconds` for the first step, which compiles, connects and checks
COMPILING = 6  # the same where blocks are compiled
ASKED = 3  # steps' time that a run has to reach a step boundary after a signal
AT_ONCE = 5.0  # seconds, at least, for that; and for a second Ctrl-C
SAVING = 7200.0  # seconds that a checkpoint may take: a slow disk is no hang
DEAD = 15.0  # seconds without an answer from the run's directory, at least, after which it is not waited for
ANSWERS = 10.0  # seconds for the ranks' reports
LINGER = 2.0  # seconds that the ranks which say nothing stay: a launcher ends all with the first that goes
LAST_WORDS = 5.0  # seconds to write the stacks, and to print the sentence


@dataclass
class Progress:
    """What the main thread is doing. `limit`: seconds until the rank counts as hung. `asked`: seconds until it is ended after a
    signal. None: derived from the step time. `idle`: seconds that it has taken so far."""

    doing: str
    limit: float | None = None
    asked: float | None = None
    idle: float = 0.0


class Watchdog:
    """Watches one rank, from its start to its end. `directory`: the run's. `seconds`: see `train.hang_seconds`; with 0 it only
    handles signals. `ranks`: those that this one has met, if it has. `compiles`: the first step takes longer. `heartbeat`:
    tells about the rank meanwhile."""

    def __init__(self, directory: Path, seconds: float, ranks: WatchedRanks | None = None):
        self.directory, self.seconds, self.ranks = directory, seconds, ranks or OneRank()
        self.compiles = False
        self.progress = Progress("the start", SAVING, 2 * AT_ONCE)
        self.heartbeat: Heartbeat | None = None
        self.step = 0  # the step under way
        self.took: deque[float] = deque(maxlen=16)  # seconds of the newest steps
        self.signals: list[int] = []
        self.ending = threading.Event()
        self.disk, self.next_look, self.written = DiskThread(), 0.0, False
        self.next_sign = 0.0

    def __enter__(self) -> Self:
        self.read, self.write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.wakeup = signal.set_wakeup_fd(self.write, warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ending.set()
        self.thread.join()
        self.ranks.keep_alive(None)
        if self.disk.wait(LAST_WORDS) and self.heartbeat:
            self.disk.do(partial(self._tell, self.heartbeat, ended=True))
            self.disk.wait(LAST_WORDS)
        self.disk.close()
        signal.set_wakeup_fd(self.wakeup)
        faulthandler.cancel_dump_traceback_later()
        os.close(self.read)
        os.close(self.write)

    # -- told by the main thread -----------------------------------------------------------------------

    def begin(self, step: int) -> None:
        self.step = step
        self._go_on(Progress(f"step {step}"))

    def end(self, seconds: float) -> None:
        """A step is done."""
        self.took.append(seconds)

    def finish(self) -> None:
        """All steps are done."""
        self.progress = Progress("the end", SAVING, SAVING)
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def saving(self, doing: str = "saving a checkpoint") -> Iterator[None]:
        """Inside, a checkpoint is written or waited for, or something else goes on that takes as long."""
        before = self.progress
        self.progress = Progress(doing, SAVING, SAVING)
        faulthandler.cancel_dump_traceback_later()
        try:
            yield
        finally:
            before.idle = 0.0
            self.progress = before

    def each(self, items: Iterable[T], doing: str) -> Iterator[T]:
        """Yield the items; taking one counts as progress."""
        for item in items:
            self._go_on(Progress(doing))
            yield item

    def _go_on(self, progress: Progress) -> None:
        """The main thread does something new. Should it hold the interpreter so that the watchdog's thread cannot run,
        faulthandler's timer, which needs no interpreter, ends the process."""
        self.progress = progress
        if limit := self._limit():
            faulthandler.dump_traceback_later(2 * limit + ANSWERS, exit=True, file=sys.__stderr__ or 2)

    # -- the thread ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        last = time.monotonic()
        while not self.ending.wait(TICK):
            now = time.monotonic()
            self.progress.idle += min(now - last, GAP)
            last = now
            self._hear()
            self._look()
            if self.seconds and now > self.next_sign:
                self.ranks.keep_alive(2 * max(self.seconds, DEAD) + ANSWERS)  # later than the other ranks name this one
                self.next_sign = now + EVERY
            limit = self._limit()
            if self.signals and self.progress.idle > self._patience():
                self._end(code_of_signal(self.signals[0]))
            elif limit and self.progress.idle > limit:
                self._end(HUNG)

    def _look(self) -> None:
        """Let the run's directory be written to, or only be looked at before the run has taken it."""
        if self.heartbeat:
            if self.heartbeat.due():
                self.disk.do(partial(self._tell, self.heartbeat))
        elif time.monotonic() > self.next_look and self.disk.do(partial(os.stat, self.directory)):
            self.next_look = time.monotonic() + EVERY

    def _tell(self, heartbeat: Heartbeat, *, ended: bool = False) -> None:
        took = self.took[-1] if self.took else None
        now = self.progress
        heartbeat.beat(step=self.step, doing=now.doing, idle=now.idle, step_seconds=took, ended=ended)

    def _hear(self) -> None:
        try:
            self.signals += [n for n in os.read(self.read, 64) if n in ASKING]
        except BlockingIOError:
            return

    def _limit(self) -> float | None:
        """Seconds that the current work may take; None: no limit."""
        if not self.seconds:
            return None
        if self.progress.limit is None:
            first = (COMPILING if self.compiles else FIRST) * self.seconds
            return max(self.seconds, STEPS * max(self.took)) if self.took else first
        dead = max(self.seconds, DEAD)
        return dead if self.disk.taken() > dead else max(self.progress.limit, self.seconds)

    def _patience(self) -> float:
        """Seconds that the current work may take after a signal."""
        if signal.SIGINT in self.signals[1:]:  # a scheduler may send others to the launcher and to the ranks
            return AT_ONCE
        if self.progress.asked is None:
            return max(AT_ONCE, ASKED * max(self.took)) if self.took else 2 * AT_ONCE
        return min(DEAD, self.progress.asked) if self.disk.taken() > DEAD else self.progress.asked

    def _end(self, code: int) -> None:
        """Find out who waits for whom, print it, and exit; the main thread cannot. Print nothing if a rank has said why the run
        ends: the main thread waits for that rank, and the signal is the launcher's."""
        faulthandler.cancel_dump_traceback_later()
        if (failed := self.ranks.failed()) is not None:
            os._exit(failed)
        idle, own = self.progress.idle, self.ranks.where() | {"doing": self.progress.doing}
        answers = self.ranks.exchange(own, ANSWERS)
        left = self._leave_stacks()
        if self.ranks.rank == min(answers):
            absent = [self.ranks.absent(r) for r in range(self.ranks.world) if r not in answers]
            sentence = f"error: {explain_hang(answers, absent, idle)}; {left}"
            call_with_timeout(LAST_WORDS, lambda: print(sentence, file=sys.stderr, flush=True))  # a log may lie there, too
        else:
            time.sleep(LINGER)
        os._exit(code)

    def _leave_stacks(self) -> str:
        """Write the stacks of this rank, if its directory answers. Returns a clause that says where they are, or why not."""
        if self.disk.wait(LAST_WORDS) and self.disk.do(self._write_stacks) and self.disk.wait(LAST_WORDS):
            return f"stacks are in {self.directory / 'hang'}" if self.written else "the stacks could not be written"
        return (
            f"{self.directory} has not answered for {self.disk.taken():.0f} s: look after its file system, or give another --run"
        )

    def _write_stacks(self) -> None:
        directory = self.directory / "hang"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"rank-{self.ranks.rank:05d}.txt").write_text(self.ranks.stacks())
        self.written = True


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
    if len(answers) == 1 and not absent:  # there is no other rank to come to
        parts = [f"it is in {a['line']}" for a in answers.values()]
    return f"nothing went on for {idle:.0f} s in {answers[min(answers)]['doing']}: {'; '.join(parts + absent)}"


def _grouped(waiting: dict[int, Where]) -> dict[str, list[int]]:
    by_place: dict[str, list[int]] = {}
    for rank, a in sorted(waiting.items()):
        what = f"the {a['collective']}" if a["collective"] else a["line"]
        by_place.setdefault(f"{what} of unit {a['unit']}" if a["unit"] else what, []).append(rank)
    return by_place


def _ranks(ranks: list[int]) -> str:
    shown = first_of(ranks, 8)
    return f"ranks {shown} wait" if len(ranks) > 1 else f"rank {shown} waits"
