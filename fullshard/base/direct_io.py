"""Direct I/O: aligned memory, files that bypass the page cache, and reads and writes of exactly so many bytes.

Knows neither checkpoints nor homes. Standard library only.
"""

import errno
import fcntl
import mmap
import os

ALIGNMENT = 4096  # bytes: O_DIRECT takes memory, file offsets and lengths in multiples of it
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)  # how a file system refuses direct I/O


def aligned_size(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned(nbytes: int) -> memoryview:
    """Zeroed memory on pages of its own; its length is a multiple of ALIGNMENT."""
    return memoryview(mmap.mmap(-1, max(ALIGNMENT, aligned_size(nbytes))))


def make_direct(file: int) -> bool:
    """Switch an open file to direct I/O; return False if its file system has none."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def write_direct(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data`. If the disk refuses a direct request, the file uses the page cache from then on."""
    try:
        write_exactly(file, data, offset)
    except OSError as error:
        if error.errno != errno.EINVAL or not is_direct(file):
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
        write_exactly(file, data, offset)


def write_exactly(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data`. Raises OSError, of ENOSPC if the disk is full."""
    done = 0
    while done < len(data):
        count = os.pwrite(file, data[done:], offset + done)
        if count < min(ALIGNMENT, len(data) - done):  # the disk filled up in the middle of a page
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += _whole(count, len(data) - done)


def read_exactly(file: int, into: memoryview, offset: int) -> None:
    """Fill `into`. Raises EOFError if the file is too short."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], offset + done)
        if count < min(ALIGNMENT, len(into) - done):
            raise EOFError
        done += _whole(count, len(into) - done)


def _whole(count: int, left: int) -> int:
    """Of `count` bytes done, those after which a direct request may continue."""
    return count if count == left else count // ALIGNMENT * ALIGNMENT
