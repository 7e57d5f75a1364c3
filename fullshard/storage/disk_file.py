"""One temporary file for offloaded bytes: direct I/O, several requests in flight, no file left behind.

Threads do the requests, each with a blocking `pread` or `pwrite` that releases the interpreter lock. With parts of megabytes
a few threads keep a disk's queue full. io_uring would only save system calls, which cost nothing here. Most containers forbid
it, and its Python bindings are young: liburing calls itself alpha and wants Linux 6.14, pyuring has wheels for x86-64 only.
"""

import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from fullshard.base.direct_io import (
    ALIGNMENT,
    aligned,
    aligned_size,
    is_direct,
    make_direct,
    read_exactly,
    write_direct,
    write_exactly,
)
from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text

PART = 8 << 20  # bytes of one system call
IN_FLIGHT = 8  # reads, and as many writes
IN_MEMORY = ("tmpfs", "ramfs")  # file systems that accept direct I/O and have no disk

Work = Callable[[int, memoryview], None]


class DiskFile:
    """A file of `nbytes` without a name: it goes with the process, however that ends.

    Requests run in no order: before reading a range, wait for its write. Do not touch the memory until the future is done.
    Offsets, lengths and addresses are multiples of `ALIGNMENT`. With `checksums`, a range is read in the requests in which it
    was written, and a difference is an error. `direct` is True if requests bypass the page cache.
    """

    def __init__(self, directory: str | Path, name: str, nbytes: int, checksums: bool = False):
        self.path, self.nbytes, self.checksums = Path(directory) / name, aligned_size(nbytes), checksums
        self.file = _nameless(self.path)
        try:
            _reserve(self.file, self.path, self.nbytes)
            self.direct = _try_direct(self.file, self.path)
        except BaseException:
            os.close(self.file)
            raise
        self._sums: dict[int, tuple[int, int]] = {}  # by offset of a part: its length and checksum
        # Two pools, so that reads do not queue behind writes.
        self._readers, self._writers = (ThreadPoolExecutor(IN_FLIGHT, f"{name}-{kind}") for kind in ("read", "write"))
        self._open = True
        self._release = weakref.finalize(self, os.close, self.file)  # if nobody calls close()

    def grow(self, nbytes: int) -> None:
        """Add so many bytes at the end. If the disk has no room for them, the contents are lost."""
        _reserve(self.file, self.path, self.nbytes + aligned_size(nbytes))
        self.nbytes += aligned_size(nbytes)

    def read(self, offset: int, into: memoryview) -> Future[None]:
        """Fill `into` from `offset` on. The future raises a FullshardError if bytes are missing or were changed."""
        return self._start(self._readers, self._read_part, offset, into)

    def write(self, offset: int, data: memoryview) -> Future[None]:
        """Write all of `data` at `offset`."""
        return self._start(self._writers, self._write_part, offset, data)

    def _start(self, pool: ThreadPoolExecutor, work: Work, offset: int, memory: memoryview) -> Future[None]:
        """Divide a request among the threads. Its future is done with the last part."""
        memory = memory.cast("B")
        self._check(offset, memory)
        starts = range(0, len(memory), PART)
        request = _Request(len(starts))
        for at in starts:
            pool.submit(work, offset + at, memory[at : at + PART]).add_done_callback(request.part_done)
        return request.future

    def _check(self, offset: int, memory: memoryview) -> None:
        """Raise for a closed file, for bytes outside it, and for what direct I/O cannot take."""
        if not self._open:
            raise ValueError(f"{self.path} is closed")
        if not 0 <= offset <= offset + len(memory) <= self.nbytes:
            raise ValueError(f"{self.path} has {self.nbytes} bytes; {len(memory)} at {offset} lie outside")
        address = np.frombuffer(memory, np.uint8).ctypes.data if len(memory) else 0
        if (offset | len(memory) | address) % ALIGNMENT:
            raise ValueError(f"{len(memory)} bytes at {offset}, memory at {address:#x}: not multiples of {ALIGNMENT}")

    def _read_part(self, offset: int, into: memoryview) -> None:
        try:
            read_exactly(self.file, into, offset)
        except EOFError:
            raise FullshardError(f"{self.path} was cut short: {len(into)} bytes at {offset} cannot be read") from None
        except OSError as error:
            raise FullshardError(f"{self.path}: cannot read {len(into)} bytes at {offset}: {error.strerror}") from None
        if self.checksums and self._sums.get(offset) != _sum(into):
            raise FullshardError(f"{self.path}: the {len(into)} bytes at {offset} are not those that were written there")

    def _write_part(self, offset: int, data: memoryview) -> None:
        if self.checksums:
            self._sums[offset] = _sum(data)
        try:
            write_exactly(self.file, data, offset)
        except OSError as error:
            raise FullshardError(f"{self.path}: cannot write {len(data)} bytes at {offset}: {error.strerror}") from None

    def close(self) -> None:
        """Wait for all requests, and close the file."""
        if self._open:
            self._open = False
            self._readers.shutdown()
            self._writers.shutdown()
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Request:
    """A future for several parts. It is done when the last part is, so that the memory can be reused."""

    def __init__(self, parts: int):
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()
        self.left, self.error, self.lock = parts, None, threading.Lock()
        if not parts:
            self.future.set_result(None)

    left: int
    error: BaseException | None

    def part_done(self, part: Future[None]) -> None:
        with self.lock:
            self.left -= 1
            self.error = self.error or part.exception()
            last = not self.left
        if last and self.error:
            self.future.set_exception(self.error)
        elif last:
            self.future.set_result(None)


def _sum(data: memoryview) -> tuple[int, int]:
    return len(data), xxhash.xxh3_64_intdigest(data)


def mapped_memory(directory: str | Path, name: str, nbytes: int) -> mmap.mmap:
    """Memory whose pages are those of a file without a name. The kernel writes them out and drops them where memory is short."""
    path = Path(directory) / name
    file = _nameless(path)
    try:
        _reserve(file, path, nbytes)
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)


# -- the file -----------------------------------------------------------------------------------------


def _nameless(path: Path) -> int:
    """An open file without a name, in the directory of `path`: a killed process leaves none behind."""
    try:
        file, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.unlink(name)
    except OSError as error:
        raise FullshardError(f"no file can be made in {path.parent}: {error.strerror}") from None
    return file


def _reserve(file: int, path: Path, nbytes: int) -> None:
    """Allocate all blocks now, so that a disk that is too small is found before training starts."""
    try:
        if nbytes:
            os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise FullshardError(f"{path}: cannot reserve {bytes_text(nbytes)}: {error.strerror}") from None
        os.ftruncate(file, 0)
        disk = os.fstatvfs(file)
        free = bytes_text(disk.f_bavail * disk.f_frsize)
        raise FullshardError(
            f"{path.parent} has {free} free, but {path.name} takes {bytes_text(nbytes)}; make room, or use another disk"
        ) from None


def _try_direct(file: int, path: Path) -> bool:
    """Switch to direct I/O. Returns False if the file system has none, or the disk wants larger multiples than ALIGNMENT."""
    if file_system(path.parent) in IN_MEMORY:
        return False
    try:
        if make_direct(file) and os.fstat(file).st_size:
            write_direct(file, aligned(ALIGNMENT), 0)
    except OSError as error:
        raise FullshardError(f"{path}: cannot be written: {error.strerror}") from None
    return is_direct(file)


def file_system(directory: Path) -> str:
    """The kind of a directory's file system, such as ext4; an empty string if the kernel does not list it."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[2] == number:
            return line.partition(" - ")[2].split()[0]
    return ""
