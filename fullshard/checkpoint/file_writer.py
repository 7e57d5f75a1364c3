"""Writes whole files with direct I/O, past the page cache, where the filesystem supports it.

A checkpoint is written once and rarely read. Caching it would evict pages that training needs, and the copy into the cache
takes a core's time. Direct I/O needs aligned memory (see `fullshard.base.direct_io`).
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from fullshard.base.direct_io import ALIGNMENT, aligned, aligned_size, make_direct, write_direct

PIECE = 1 << 24  # bytes of one write
SMALL = 1 << 20  # bytes: smaller files go through the page cache, which is as fast
IN_FLIGHT = 4  # concurrent writes: a single one does not fill a disk's queue

Make = Callable[[int, memoryview], None]  # fills the memory with the file's bytes from an offset on


def write_file(path: Path, data: memoryview, length: int) -> None:
    """Create or replace a file of the first `length` bytes of `data`, and fsync it. Raises OSError, e.g. on a full disk."""
    direct = len(data) > SMALL and len(data) % ALIGNMENT == 0
    end = len(data) if direct else length
    with _created(path, length, direct=direct) as file:
        write_direct(file, data[: min(PIECE, end)], 0)
        rest = range(PIECE, end, PIECE)
        if rest:
            with ThreadPoolExecutor(IN_FLIGHT) as pool:
                list(pool.map(lambda at: write_direct(file, data[at : min(at + PIECE, end)], at), rest))


def write_made(path: Path, length: int, make: Make) -> None:
    """As `write_file`, for bytes that are produced while writing: `make` is called for one piece after another, in order.
    Holds as many pieces in memory as are in flight."""
    free = [aligned(min(PIECE, length)) for _ in range(IN_FLIGHT)]
    flying: deque[tuple[Future[None], memoryview]] = deque()
    with _created(path, length, direct=True) as file, ThreadPoolExecutor(IN_FLIGHT) as pool:
        for at in range(0, length, PIECE):
            memory, size = free.pop() if free else _landed(flying), min(PIECE, length - at)
            make(at, memory[:size])
            flying.append((pool.submit(write_direct, file, memory[: aligned_size(size)], at), memory))
            if at == 0:  # alone: it finds out whether the disk takes direct requests
                free.append(_landed(flying))
        while flying:
            _landed(flying)


def _landed(flying: deque[tuple[Future[None], memoryview]]) -> memoryview:
    """Wait for the oldest write, and return its memory."""
    future, memory = flying.popleft()
    future.result()
    return memory


@contextmanager
def _created(path: Path, length: int, *, direct: bool) -> Iterator[int]:
    """A new file, cut to its length (direct requests write whole pages) and durable in the end."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        if direct:
            make_direct(file)
        yield file
        if direct:
            os.ftruncate(file, length)
        os.fsync(file)
    finally:
        os.close(file)


def sync_directory(path: Path) -> None:
    """Make a new name in a directory durable."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
