"""Whole files to disk and back, past the page cache where the filesystem lets us.

A checkpoint is written once and rarely read: caching it would push out what training needs, and the copy into
the cache costs a core. Memory that is aligned (see `fullshard.direct`) goes straight to the disk.
"""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fullshard.direct import ALIGNMENT, write_exactly

PIECE = 1 << 24  # bytes of one write
SMALL = 1 << 20  # bytes up to which the page cache is as good
IN_FLIGHT = 4  # writes at a time: one alone does not fill a disk's queue


def write_file(path: Path, data: memoryview, length: int) -> None:
    """Create or replace a file of the first `length` bytes of `data`, and fsync. Raises OSError, on a full disk for one."""
    if len(data) > SMALL and len(data) % ALIGNMENT == 0 and _write_direct(path, data, length):
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for start in range(0, length, PIECE):
            write_exactly(file, data[start : min(start + PIECE, length)], start)
        os.fsync(file)
    finally:
        os.close(file)


def _write_direct(path: Path, data: memoryview, length: int) -> bool:
    """False where this filesystem, or this memory, does not allow it."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_DIRECT, 0o666)
    except OSError:
        return False
    try:
        try:
            write_exactly(file, data[:PIECE], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:  # not aligned for this disk
                return False
            raise
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(lambda at: write_exactly(file, data[at : at + PIECE], at), range(PIECE, len(data), PIECE)))
        os.ftruncate(file, length)  # the padding of the last page
        os.fsync(file)
    finally:
        os.close(file)
    return True


def sync_directory(path: Path) -> None:
    """Make a new name in a directory durable."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
