"""Measures a disk, and tells whether it is fast enough for a step, before the run starts."""

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from fullshard.base.direct_io import ALIGNMENT, aligned, aligned_size
from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text, rate_text, seconds_text
from fullshard.storage.disk_file import IN_MEMORY, DiskFile, file_system

REQUEST = 32 << 20  # bytes
IN_FLIGHT = 3  # requests, each of several parts: enough to keep a disk busy, few enough to end soon
CACHED = 256 << 20  # bytes, at most, if they go through the page cache
SLOWEST = 20.0  # times the rest of a step: more is warned of, as hardly anybody wants it


class Rates(NamedTuple):
    """Bytes a second of reading and of writing alone; `both`: their sum when they run at once, if it was measured."""

    read: float
    write: float
    both: float | None = None

    def seconds(self, read: int, written: int) -> float:
        """Seconds for so many bytes: first both ways at once, then the rest of one."""
        if self.both is None:
            return read / self.read + written / self.write
        less = min(read, written)
        return 2 * less / self.both + (read - less) / self.read + (written - less) / self.write


def disk_rates(directory: str | Path, nbytes: int = 1 << 30, seconds: float = float("inf")) -> Rates:
    """Measure a disk with the requests of a run: at most `nbytes`, started for at most `seconds`. Ranks that share a disk
    measure at the same time, each its part."""
    with DiskFile(directory, "rates", ALIGNMENT) as probe:
        nbytes = aligned_size(nbytes if probe.direct else min(nbytes, CACHED))
    with DiskFile(directory, "rates", nbytes) as file:
        into, out = (aligned(min(nbytes, IN_FLIGHT * REQUEST)) for _ in range(2))
        out[:] = (os.urandom(1 << 20) * (-(-len(out) >> 20)))[: len(out)]
        filled, _ = _rate(file, out, nbytes, seconds / 4, reading=False)  # a run overwrites blocks that were written before
        write = _rate(file, out, filled, seconds / 4, reading=False)[1]
        _forget(file)
        read = _rate(file, into, filled, seconds / 4, reading=True)[1]
        _forget(file)
        return Rates(read, write, _both(file, into, out, filled, seconds / 4))


def timed_directory(directory: Path | None) -> Path:
    """Where to time a disk: by default the directory of temporary files."""
    where = directory or Path(tempfile.gettempdir())
    if not where.is_dir():
        raise FullshardError(f"{where} is not a directory; write the directory whose disk is to be timed")
    return where


def measured_disk(directory: Path, nbytes: int, sharing: int) -> dict[str, Any]:
    """The numbers of a disk in a measured cluster, and `notes`. `sharing`: how many ranks share what is free."""
    rates, note = disk_rates(directory, nbytes), no_disk(directory)
    free = shutil.disk_usage(directory).free // sharing
    found = {"disk_read": rates.read, "disk_write": rates.write, "disk_both": rates.both, "disk": free or None}
    return {name: rate for name, rate in found.items() if rate is not None} | {"notes": [note] if note else []}


def slowest(rates: Sequence[Rates]) -> Rates:
    """The rates of the slowest of several ranks, in each direction."""
    at_once = [both for _, _, both in rates if both is not None]
    read, write = (min(found) for found in list(zip(*rates, strict=True))[:2])
    return Rates(read, write, min(at_once) if len(at_once) == len(rates) else None)


def _flush(file: DiskFile) -> None:
    """Wait until written bytes are on the disk. Direct requests have waited already."""
    if not file.direct:
        os.fsync(file.file)


def _forget(file: DiskFile) -> None:
    """Drop the page cache, so that reads come from the disk."""
    if not file.direct:
        os.posix_fadvise(file.file, 0, 0, os.POSIX_FADV_DONTNEED)


def _rate(file: DiskFile, memory: memoryview, nbytes: int, seconds: float, reading: bool) -> tuple[int, float]:
    """Bytes moved, and bytes a second."""
    do, pending, at = file.read if reading else file.write, deque[Future[None]](), 0
    start = perf_counter()
    while at < nbytes and (not at or perf_counter() - start < seconds):
        if len(pending) == IN_FLIGHT:
            pending.popleft().result()
        place, size = at % len(memory), min(REQUEST, nbytes - at)
        pending.append(do(at, memory[place : place + size]))
        at += size
    for future in pending:
        future.result()
    if not reading:
        _flush(file)
    return at, at / (perf_counter() - start)


def _both(file: DiskFile, into: memoryview, out: memoryview, nbytes: int, seconds: float) -> float | None:
    """Bytes a second of reading one half of the file while writing the other; None if the file is too small."""
    half, pending, at = nbytes // 2 // ALIGNMENT * ALIGNMENT, deque[Future[None]](), 0
    start = perf_counter()
    while at < half and (not at or perf_counter() - start < seconds):
        for _ in range(2 if len(pending) == 2 * IN_FLIGHT else 0):
            pending.popleft().result()
        place, size = at % len(into), min(REQUEST, half - at)
        pending.append(file.read(at, into[place : place + size]))
        pending.append(file.write(half + at, out[place : place + size]))
        at += size
    for future in pending:
        future.result()
    _flush(file)
    return 2 * at / (perf_counter() - start) if at else None


def no_disk(directory: str | Path) -> str:
    """A warning about a directory in memory or without direct I/O; an empty string for any other."""
    kind = file_system(Path(directory))
    if kind in IN_MEMORY:
        return f"{directory} is {kind}, which is host memory and no disk: what rests there counts as host memory"
    with DiskFile(directory, "probe", ALIGNMENT) as probe:
        return "" if probe.direct else f"{directory} ({kind}) has no direct requests: every byte passes the page cache"


def verdict(bytes_a_step: tuple[int, int], rates: Rates, step_seconds: float | None) -> str:
    """A sentence on a step that reads and writes so much, and takes `step_seconds` without, if that is known. More than
    SLOWEST times that is warned of."""
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
    if seconds > SLOWEST * step_seconds:
        return f"warning: {slower}: the run will do little but wait for it; {helps}"
    return f"{slower}: the disk sets the pace; {helps}"
