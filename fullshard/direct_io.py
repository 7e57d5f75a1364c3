"""Aligned memory, and the bytes of a file exactly: what direct requests need, wherever they are made.

Knows neither checkpoints nor homes. Standard library only.
"""

import errno
import mmap
import os

ALIGNMENT = 4096  # bytes: of memory, of file offsets and of lengths, for O_DIRECT


def aligned_size(nbytes: int) -> int:
    """The next whole multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned(nbytes: int) -> memoryview:
    """Zeroed memory of its own pages, in whole multiples of ALIGNMENT."""
    return memoryview(mmap.mmap(-1, max(ALIGNMENT, aligned_size(nbytes))))


def write_exactly(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        count = os.pwrite(file, data[done:], offset + done)
        if count < min(ALIGNMENT, len(data) - done):  # a disk that filled up in the middle of a page
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += _whole(count, len(data) - done)


def read_exactly(file: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], offset + done)
        if count < min(ALIGNMENT, len(into) - done):
            raise EOFError
        done += _whole(count, len(into) - done)


def _whole(count: int, left: int) -> int:
    """As much of a part as a direct request may go on from."""
    return count if count == left else count // ALIGNMENT * ALIGNMENT
