"""A fuzz target, and how one case of it is judged.

A case is made by a seeded generator, so that its number repeats it. It passes if it is accepted, or refused with one
`FullshardError` sentence, within the target's bounds of memory and time. Anything else is a finding.
"""

import faulthandler
import signal
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fullshard.errors import FullshardError

SECONDS = 10  # of the processor's time that a case may take: a loaded machine is no finding
WAITS = 120  # seconds by the clock that a case may take, for one that waits
STUCK = 300  # seconds after which a case that no signal interrupts ends the process with its stack
LONGEST_SENTENCE = 2000  # characters
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # directories of cases: a disk would take most of the time


@dataclass(frozen=True)
class Target:
    """`make` writes what a case needs into an empty directory and returns the argument of `run`. `bound`: bytes of memory
    that a case may take at once, Python's allocations and the process's resident memory alike."""

    name: str
    make: Callable[[Random, Path], Any]
    run: Callable[[Any], object]
    bound: int


@dataclass(frozen=True)
class Finding:
    """What went wrong in a case."""

    target: str
    seed: int
    case: int
    what: str

    def __str__(self) -> str:
        repeat = f"python -m tests.fuzz {self.target} --seed {self.seed} --first {self.case} --cases 1"
        return f"{self.target} case {self.case}: {self.what}\n  repeat it: {repeat}"


@dataclass
class Tally:
    """The cases of one target so far."""

    cases: int = 0
    refused: int = 0
    largest: int = 0  # bytes


def judge(target: Target, seed: int, case: int, tally: Tally) -> Finding | None:
    """Carry out one case."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        made = target.make(Random(f"{seed}:{target.name}:{case}"), Path(directory))
        what, took = _carry_out(target, made, tally)
    tally.cases += 1
    tally.largest = max(tally.largest, took)
    if what is None and took > target.bound:
        what = f"took {took:,} bytes, more than its bound of {target.bound:,}"
    return Finding(target.name, seed, case, what) if what else None


def _carry_out(target: Target, made: Any, tally: Tally) -> tuple[str | None, int]:
    """What is wrong, if anything, and the bytes that it took."""
    before = _reset_resident()
    tracemalloc.start(1)
    try:
        with _limited():
            target.run(made)
        what = None
    except FullshardError as error:
        tally.refused += 1
        what = _odd_sentence(str(error))
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return what, max(traced, _resident("VmHWM") - before)


def _odd_sentence(said: str) -> str | None:
    if not said.strip() or "Traceback" in said or len(said) > LONGEST_SENTENCE:
        return f"refused by what is no sentence: {said[:300]!r}"
    return None


@contextmanager
def _limited() -> Iterator[None]:
    """Raise after SECONDS of work or WAITS in Python's code; end the process after STUCK elsewhere."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {SECONDS} s of the processor's time, or {WAITS} s by the clock")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WAITS))
    before = [signal.signal(number, late) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    faulthandler.dump_traceback_later(STUCK, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def _reset_resident() -> int:
    """Begin to count the process's peak anew; its resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024
