"""Activations in a file, with a little host memory before it. The file grows in the first forward.

Bytes that have reached the host are written, and then their memory is free. They are read back before backward needs them.
Knows bytes and events, not modules.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fullshard.base.direct_io import ALIGNMENT, aligned_size
from fullshard.on_torch.offload.activations.host_pool import FreeRanges, HostBlock, HostPool
from fullshard.planner.step.saved_activations import UNITS_IN_TRANSIT
from fullshard.storage.disk_file import DiskFile
from fullshard.storage.pinned_arena import bytes_of

GROWTH = 64 << 20  # bytes: the file grows by at least so many
WAITING_THREADS = 4  # that wait for copies of a GPU


class FileRange:
    """Bytes in the file, and their block of host memory before they are written and after they are read."""

    __slots__ = ("block", "nbytes", "read", "start", "written")

    def __init__(self, nbytes: int, start: int, block: HostBlock):
        self.nbytes, self.start = nbytes, start
        self.block: HostBlock | None = block
        self.written: Future[None] | None = None
        self.read: Future[None] | None = None

    @property
    def bytes(self) -> Tensor:
        """In host memory."""
        assert self.block is not None
        return self.block.bytes[: self.nbytes]

    @property
    def idle(self) -> bool:
        """True if no read or write of this range is under way."""
        return all(request is None or request.done() for request in (self.written, self.read))


class ActivationFile:
    """The file of one rank. `written` and `read` count bytes since the start. `passing` are the bytes in host memory now,
    `most` those that were there at once."""

    def __init__(self, directory: str | Path, *, pinned: bool):
        self.file = DiskFile(directory, "activations", ALIGNMENT)
        self.ranges = FreeRanges(self.file.nbytes)
        self.pool = HostPool(pinned, paged=True)
        self.limit = self.passing = self.most = 0
        self.leaving: deque[tuple[HostBlock, Future[None]]] = deque()  # memory, and the request after which it is free
        self.forgotten: deque[FileRange] = deque()
        self.waiters = ThreadPoolExecutor(WAITING_THREADS, "activations")
        self.written = self.read = 0

    def visited(self, places: Iterable[FileRange]) -> None:
        """A module's forward has written these: the limit of host memory follows the largest."""
        self.limit = max(self.limit, UNITS_IN_TRANSIT * sum(aligned_size(p.nbytes) for p in places))

    # -- out ---------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> FileRange:
        """A range of the file, with memory to fill before `write`."""
        return FileRange(nbytes, self._place(aligned_size(nbytes)), self._memory(aligned_size(nbytes)))

    def write(self, place: FileRange, copied: torch.cuda.Event | None) -> None:
        """Write the bytes once they are `copied`; then their memory is free."""
        block = place.block
        assert block is not None
        if copied is None:
            place.written = self.file.write(place.start, bytes_of(block.bytes))
        else:
            place.written = self.waiters.submit(self._write_after, copied, place.start, block)
        self.leaving.append((block, place.written))
        self.written += place.nbytes
        place.block = None

    def _write_after(self, copied: torch.cuda.Event, start: int, block: HostBlock) -> None:
        copied.synchronize()
        self.file.write(start, bytes_of(block.bytes)).result()

    # -- back --------------------------------------------------------------------------------------------

    def start_read(self, place: FileRange) -> None:
        """Start to read, unless that was done before."""
        if place.read is not None:
            return
        assert place.written is not None
        place.written.result()  # requests run in no order
        place.block = self._memory(aligned_size(place.nbytes))
        place.read = self.file.read(place.start, bytes_of(place.block.bytes))
        self.read += place.nbytes

    def await_read(self, place: FileRange) -> None:
        """Wait until the bytes are in host memory."""
        self.start_read(place)
        assert place.read is not None
        place.read.result()

    def release(self, place: FileRange, copied: torch.cuda.Event | None) -> None:
        """The memory is free once the bytes are `copied` to the device."""
        block, place.block = place.block, None
        assert block is not None
        if copied is None:
            self._give(block)
        else:
            self.leaving.append((block, self.waiters.submit(copied.synchronize)))

    def forget(self, place: FileRange) -> None:
        """The range is not needed any more; it is free when no request for it is under way. Neither waits nor fails, as it is
        called when the last reference goes."""
        block, place.block = place.block, None
        if block is not None:
            self.leaving.append((block, place.read or _done()))
        self.forgotten.append(place)

    # -- room --------------------------------------------------------------------------------------------

    def _memory(self, nbytes: int) -> HostBlock:
        """A block of host memory. Above `limit`, wait for blocks that are being written, the oldest first."""
        while self.leaving and (self.leaving[0][1].done() or self.passing + nbytes > self.limit):
            block, gone = self.leaving.popleft()
            gone.result()
            self._give(block)
        self.passing += nbytes
        self.most = max(self.most, self.passing)
        return self.pool.take(nbytes)

    def _give(self, block: HostBlock) -> None:
        self.passing -= block.bytes.numel()
        self.pool.give(block)

    def _place(self, nbytes: int) -> int:
        """The start of a free range of the file, which grows if there is none."""
        for place in [self.forgotten.popleft() for _ in range(len(self.forgotten))]:
            if place.idle:
                self.ranges.give(place.start, place.start + aligned_size(place.nbytes))
            else:
                self.forgotten.append(place)
        start = self.ranges.take(nbytes)
        if start is None:
            end = self.file.nbytes
            self.file.grow(max(nbytes, GROWTH))
            self.ranges.give(end, self.file.nbytes)
            start = self.ranges.take(nbytes)
        assert start is not None
        return start


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
