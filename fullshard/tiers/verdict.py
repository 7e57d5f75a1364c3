"""Is a disk fast enough for what a step wants of it? Measured and said before the run starts."""

import os
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from fullshard.direct import ALIGNMENT, aligned, aligned_size
from fullshard.text import bytes_text, rate_text, seconds_text
from fullshard.tiers.disk import IN_MEMORY, Spool, file_system

REQUEST = 32 << 20  # bytes
FLYING = 3  # requests under way, each of several parts: enough to keep a disk busy, few enough to end soon
CACHED = 256 << 20  # bytes, at most, where the page cache takes them first and the disk later
SLOWEST = 20.0  # times the rest of a step: what a person will hardly have meant


class Rates(NamedTuple):
    """Bytes a second, each while the other way is idle."""

    read: float
    write: float


def disk_rates(directory: str | Path, nbytes: int = 1 << 30, seconds: float = float("inf")) -> Rates:
    """What a disk reaches, by requests as a run makes them; of at most `nbytes`, begun for at most `seconds`. Ranks that
    share a disk ask at the same time, each for its part."""
    with Spool(directory, "rates", ALIGNMENT) as probe:
        nbytes = aligned_size(nbytes if probe.direct else min(nbytes, CACHED))
    with Spool(directory, "rates", nbytes) as spool:
        memory = aligned(min(nbytes, FLYING * REQUEST))
        memory[:] = (os.urandom(1 << 20) * (-(-len(memory) >> 20)))[: len(memory)]
        written, write = _rate(spool, memory, nbytes, seconds / 2, reading=False)
        if not spool.direct:
            os.posix_fadvise(spool.file, 0, 0, os.POSIX_FADV_DONTNEED)
        return Rates(_rate(spool, memory, written, seconds / 2, reading=True)[1], write)


def _rate(spool: Spool, memory: memoryview, nbytes: int, seconds: float, reading: bool) -> tuple[int, float]:
    """Bytes of whole requests, and how many a second."""
    do, pending, at = spool.read if reading else spool.write, deque[Future[None]](), 0
    start = perf_counter()
    while at < nbytes and (not at or perf_counter() - start < seconds):
        if len(pending) == FLYING:
            pending.popleft().result()
        place, size = at % len(memory), min(REQUEST, nbytes - at)
        pending.append(do(at, memory[place : place + size]))
        at += size
    for future in pending:
        future.result()
    if not reading:
        os.fsync(spool.file)
    return at, at / (perf_counter() - start)


def no_disk(directory: str | Path) -> str:
    """What is to be said of a directory that is not a disk with direct requests; nothing of one that is."""
    kind = file_system(Path(directory))
    if kind in IN_MEMORY:
        return f"{directory} is {kind}, which is host memory and no disk: what rests there counts as host memory"
    with Spool(directory, "probe", ALIGNMENT) as probe:
        return "" if probe.direct else f"{directory} ({kind}) has no direct requests: every byte passes the page cache"


def verdict(
    bytes_a_step: tuple[int, int], rates: tuple[float, float], step_seconds: float | None, slowest: float = SLOWEST
) -> str:
    """A sentence on a step that reads and writes so much, and takes `step_seconds` without, if that is known. More than
    `slowest` times that is warned of."""
    seconds = sum(n / rate for n, rate in zip(bytes_a_step, rates, strict=True))
    (read, written), (in_, out) = map(bytes_text, bytes_a_step), (rate_text(r, "B/s") for r in rates)
    needs = f"the disk needs {seconds_text(seconds)} of each step ({read} read at {in_}, {written} written at {out})"
    if step_seconds is None:
        return needs
    rest = seconds_text(step_seconds)
    if seconds <= step_seconds:
        return f"{needs}, under the {rest} that the rest takes"
    slower = f"{needs}, {seconds / step_seconds:.1f} times the {rest} that the rest takes"
    helps = "keep more in host memory, take more micro-batches a step, or use a faster disk"
    if seconds > slowest * step_seconds:
        return f"warning: {slower}: the run will do little but wait for it; {helps}"
    return f"{slower}: the disk sets the pace; {helps}"
