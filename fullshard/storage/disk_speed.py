"""Is a disk fast enough for what a step wants of it? Measured and said before the run starts."""

import os
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from fullshard.direct_io import ALIGNMENT, aligned, aligned_size
from fullshard.storage.disk import IN_MEMORY, Spool, file_system
from fullshard.text import bytes_text, rate_text, seconds_text

REQUEST = 32 << 20  # bytes
FLYING = 3  # requests under way, each of several parts: enough to keep a disk busy, few enough to end soon
CACHED = 256 << 20  # bytes, at most, where the page cache takes them first and the disk later
SLOWEST = 20.0  # times the rest of a step: what a person will hardly have meant


class Rates(NamedTuple):
    """Bytes a second, each while the other way is idle; `both`: the sum of the two at once, where it was tried."""

    read: float
    write: float
    both: float | None = None

    def seconds(self, read: int, written: int) -> float:
        """Of so many bytes each way: what goes both ways at once, then what is left of one."""
        if self.both is None:
            return read / self.read + written / self.write
        less = min(read, written)
        return 2 * less / self.both + (read - less) / self.read + (written - less) / self.write


def disk_rates(directory: str | Path, nbytes: int = 1 << 30, seconds: float = float("inf")) -> Rates:
    """What a disk reaches, by requests as a run makes them; of at most `nbytes`, begun for at most `seconds`. Ranks that
    share a disk ask at the same time, each for its part."""
    with Spool(directory, "rates", ALIGNMENT) as probe:
        nbytes = aligned_size(nbytes if probe.direct else min(nbytes, CACHED))
    with Spool(directory, "rates", nbytes) as spool:
        into, out = (aligned(min(nbytes, FLYING * REQUEST)) for _ in range(2))
        out[:] = (os.urandom(1 << 20) * (-(-len(out) >> 20)))[: len(out)]
        filled, _ = _rate(spool, out, nbytes, seconds / 4, reading=False)  # a run writes where it has written before
        write = _rate(spool, out, filled, seconds / 4, reading=False)[1]
        _forget(spool)
        read = _rate(spool, into, filled, seconds / 4, reading=True)[1]
        _forget(spool)
        return Rates(read, write, _both(spool, into, out, filled, seconds / 4))


def _settle(spool: Spool) -> None:
    """Until the disk has what was written; direct requests have told so themselves, and a run asks for no more."""
    if not spool.direct:
        os.fsync(spool.file)


def _forget(spool: Spool) -> None:
    """So that what is read comes from the disk."""
    if not spool.direct:
        os.posix_fadvise(spool.file, 0, 0, os.POSIX_FADV_DONTNEED)


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
        _settle(spool)
    return at, at / (perf_counter() - start)


def _both(spool: Spool, into: memoryview, out: memoryview, nbytes: int, seconds: float) -> float | None:
    """Bytes a second of reading one half of what there is while the other is written; None where there is too little."""
    half, pending, at = nbytes // 2 // ALIGNMENT * ALIGNMENT, deque[Future[None]](), 0
    start = perf_counter()
    while at < half and (not at or perf_counter() - start < seconds):
        for _ in range(2 if len(pending) == 2 * FLYING else 0):
            pending.popleft().result()
        place, size = at % len(into), min(REQUEST, half - at)
        pending.append(spool.read(at, into[place : place + size]))
        pending.append(spool.write(half + at, out[place : place + size]))
        at += size
    for future in pending:
        future.result()
    _settle(spool)
    return 2 * at / (perf_counter() - start) if at else None


def no_disk(directory: str | Path) -> str:
    """What is to be said of a directory that is not a disk with direct requests; nothing of one that is."""
    kind = file_system(Path(directory))
    if kind in IN_MEMORY:
        return f"{directory} is {kind}, which is host memory and no disk: what rests there counts as host memory"
    with Spool(directory, "probe", ALIGNMENT) as probe:
        return "" if probe.direct else f"{directory} ({kind}) has no direct requests: every byte passes the page cache"


def verdict(bytes_a_step: tuple[int, int], rates: Rates, step_seconds: float | None, slowest: float = SLOWEST) -> str:
    """A sentence on a step that reads and writes so much, and takes `step_seconds` without, if that is known. More than
    `slowest` times that is warned of."""
    seconds = rates.seconds(*bytes_a_step)
    (read, written), (in_, out) = map(bytes_text, bytes_a_step), (rate_text(r, "B/s") for r in rates[:2])
    at_once = "" if rates.both is None else f", {rate_text(rates.both, 'B/s')} both at once"
    needs = f"the disk needs {seconds_text(seconds)} of each step ({read} read at {in_}, {written} written at {out}{at_once})"
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
