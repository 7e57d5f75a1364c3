"""Fuzz targets, and how one case of a target is run.

A case is made by a generator that is seeded with its number, so the number reproduces it. A case passes if its input is
accepted, or refused with a `FullshardError` of one sentence, within the target's limits of memory and time. Anything
else is a finding.
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

from fullshard.base.errors import FullshardError

CPU_LIMIT = 10  # seconds of CPU time per case, so that a loaded machine is no finding
CLOCK_LIMIT = 120  # seconds of wall-clock time per case, for one that waits
HARD_LIMIT = 300  # seconds after which the process prints its stack and ends, if no signal interrupts the case
LONGEST_SENTENCE = 2000  # characters
RAM_DISK = "/dev/shm" if Path("/dev/shm").is_dir() else None  # for the cases' files; a disk would take most of the time


@dataclass(frozen=True)
class Target:
    """`make` writes the files of a case into an empty directory and returns the argument of `run`. `bound`: the most bytes
    that a case may take, both of Python's allocations and of resident memory."""

    name: str
    make: Callable[[Random, Path], Any]
    run: Callable[[Any], object]
    bound: int


@dataclass(frozen=True)
class Finding:
    """A case that failed, and how."""

    target: str
    seed: int
    case: int
    what: str

    def __str__(self) -> str:
        repeat = f"python -m tests.fuzz {self.target} --seed {self.seed} --first {self.case} --cases 1"
        return f"{self.target} case {self.case}: {self.what}\n  repeat it: {repeat}"


@dataclass
class Counts:
    """The cases of one target so far: how many, how many refused, and the most bytes that one took."""

    cases: int = 0
    refused: int = 0
    largest: int = 0  # bytes

    def add(self, other: "Counts") -> None:
        self.cases, self.refused = self.cases + other.cases, self.refused + other.refused
        self.largest = max(self.largest, other.largest)


def run_case(target: Target, seed: int, case: int, counts: Counts) -> Finding | None:
    """Run one case and count it. Returns a finding if it failed."""
    with tempfile.TemporaryDirectory(dir=RAM_DISK) as directory:
        made = target.make(Random(f"{seed}:{target.name}:{case}"), Path(directory))
        what, took = _run(target, made, counts)
    counts.cases += 1
    counts.largest = max(counts.largest, took)
    if what is None and took > target.bound:
        what = f"took {took:,} bytes, more than its bound of {target.bound:,}"
    return Finding(target.name, seed, case, what) if what else None


def _run(target: Target, made: Any, counts: Counts) -> tuple[str | None, int]:
    """What is wrong with the case, or None, and the bytes that it took."""
    before = _reset_resident()
    tracemalloc.start(1)
    try:
        with _limited():
            target.run(made)
        what = None
    except FullshardError as error:
        counts.refused += 1
        what = _odd_sentence(str(error))
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return what, max(traced, _resident("VmHWM") - before)


def _odd_sentence(sentence: str) -> str | None:
    if not sentence.strip() or "Traceback" in sentence or len(sentence) > LONGEST_SENTENCE:
        return f"refused by what is no sentence: {sentence[:300]!r}"
    return None


@contextmanager
def _limited() -> Iterator[None]:
    """Inside, raise after CPU_LIMIT or CLOCK_LIMIT seconds in Python code. End the process after HARD_LIMIT seconds."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {CPU_LIMIT} s of the processor's time, or {CLOCK_LIMIT} s by the clock")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, CPU_LIMIT), (signal.SIGALRM, signal.ITIMER_REAL, CLOCK_LIMIT))
    before = [signal.signal(number, late) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    faulthandler.dump_traceback_later(HARD_LIMIT, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def _reset_resident() -> int:
    """Reset the process's peak of resident memory. Returns its resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024
