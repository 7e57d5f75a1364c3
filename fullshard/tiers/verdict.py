"""Is a disk fast enough for what a step wants of it? Measured and said before the run starts."""

import os
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from fullshard.direct import aligned, aligned_size
from fullshard.errors import FullshardError
from fullshard.text import bytes_text, rate_text, seconds_text
from fullshard.tiers.disk import Spool

REQUEST = 32 << 20  # bytes
MEMORY = 8 * REQUEST
SLOWEST = 20.0  # times the rest of a step that a disk may take


class Rates(NamedTuple):
    """Bytes a second, each while the other way is idle."""

    read: float
    write: float


def disk_rates(directory: str | Path, nbytes: int = 1 << 30) -> Rates:
    """What a disk reaches, by requests as a run makes them. Ranks that share a disk ask at the same time, each for its part."""
    nbytes = aligned_size(nbytes)
    with Spool(directory, "rates", nbytes) as spool:
        memory = aligned(min(nbytes, MEMORY))
        memory[:] = (os.urandom(1 << 20) * (-(-len(memory) >> 20)))[: len(memory)]
        write = _rate(spool, memory, reading=False)
        if not spool.direct:
            os.posix_fadvise(spool.file, 0, 0, os.POSIX_FADV_DONTNEED)
        return Rates(_rate(spool, memory, reading=True), write)


def _rate(spool: Spool, memory: memoryview, reading: bool) -> float:
    do = spool.read if reading else spool.write
    start = perf_counter()
    pending = []
    for at in range(0, spool.nbytes, REQUEST):
        place = at % len(memory)
        pending.append(do(at, memory[place : place + min(REQUEST, spool.nbytes - at)]))
    for future in pending:
        future.result()
    if not reading:
        os.fsync(spool.file)
    return spool.nbytes / (perf_counter() - start)


def verdict(bytes_a_step: tuple[int, int], rates: tuple[float, float], step_seconds: float, slowest: float = SLOWEST) -> str:
    """A sentence on a step that reads and writes so much, and takes `step_seconds` without. Refuses more than `slowest` times
    that long."""
    seconds = sum(n / rate for n, rate in zip(bytes_a_step, rates, strict=True))
    (read, written), (in_, out) = map(bytes_text, bytes_a_step), (rate_text(r, "B/s") for r in rates)
    needs = f"the disk needs {seconds_text(seconds)} of each step ({read} read at {in_}, {written} written at {out})"
    rest = seconds_text(step_seconds)
    if seconds <= step_seconds:
        return f"{needs}, under the {rest} that the rest takes"
    slower = f"{needs}, {seconds / step_seconds:.1f} times the {rest} that the rest takes"
    helps = "keep more in host memory, take more micro-batches a step, or use a faster disk"
    if seconds > slowest * step_seconds:
        raise FullshardError(f"{slower}: too slow; {helps}")
    return f"{slower}: the disk sets the pace; {helps}"
