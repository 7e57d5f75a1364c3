"""Activations in a file: host memory that they pass in little, and a file behind it that grows in the first forward.

What has reached the host is written, and its memory is free when it is; before backward wants it, it is read back into
such memory. Knows bytes and when they are there, not whose they are.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fullshard.direct_io import ALIGNMENT, aligned_size
from fullshard.on_torch.offload.activations.host_pool import Holes, Slot, Slots
from fullshard.storage.disk import Spool
from fullshard.storage.host import bytes_of

GROWTH = 64 << 20  # bytes that the file grows by, at least
VISITS = 2  # forwards of a module whose bytes may be in host memory at once
BEHIND = 4  # threads that wait for a GPU


class Filed:
    """The place of some bytes in the file, and in host memory while they pass it."""

    __slots__ = ("nbytes", "read", "slot", "start", "written")

    def __init__(self, nbytes: int, start: int, slot: Slot):
        self.nbytes, self.start = nbytes, start
        self.slot: Slot | None = slot
        self.written: Future[None] | None = None
        self.read: Future[None] | None = None

    @property
    def bytes(self) -> Tensor:
        """In host memory."""
        assert self.slot is not None
        return self.slot.bytes[: self.nbytes]

    @property
    def at_rest(self) -> bool:
        """Whether no request for its place in the file is under way."""
        return all(request is None or request.done() for request in (self.written, self.read))


class FiledActivations:
    """The file of one rank. `written` and `read` count the bytes since the start; `passing` says how many are in host
    memory, `most` how many were there at once."""

    def __init__(self, directory: str | Path, *, pinned: bool):
        self.spool = Spool(directory, "activations", ALIGNMENT)
        self.holes = Holes(self.spool.nbytes)
        self.slots = Slots(pinned, paged=True)
        self.limit = self.passing = self.most = 0
        self.leaving: deque[tuple[Slot, Future[None]]] = deque()  # memory, and what it is free after
        self.forgotten: deque[Filed] = deque()
        self.behind = ThreadPoolExecutor(BEHIND, "activations")
        self.written = self.read = 0

    def visited(self, filed: Iterable[Filed]) -> None:
        """A module's forward has sent these here."""
        self.limit = max(self.limit, VISITS * sum(aligned_size(f.nbytes) for f in filed))

    # -- out ---------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Filed:
        """A place in the file, and memory to fill before it is written."""
        return Filed(nbytes, self._place(aligned_size(nbytes)), self._memory(aligned_size(nbytes)))

    def write(self, filed: Filed, copied: torch.cuda.Event | None) -> None:
        """Once `copied`, its bytes go to the file, and then their memory is free."""
        slot = filed.slot
        assert slot is not None
        if copied is None:
            filed.written = self.spool.write(filed.start, bytes_of(slot.bytes))
        else:
            filed.written = self.behind.submit(self._write_after, copied, filed.start, slot)
        self.leaving.append((slot, filed.written))
        self.written += filed.nbytes
        filed.slot = None

    def _write_after(self, copied: torch.cuda.Event, start: int, slot: Slot) -> None:
        copied.synchronize()
        self.spool.write(start, bytes_of(slot.bytes)).result()

    # -- back --------------------------------------------------------------------------------------------

    def send_for(self, filed: Filed) -> None:
        """Start to read, unless that has happened."""
        if filed.read is not None:
            return
        assert filed.written is not None
        filed.written.result()  # requests have no order
        filed.slot = self._memory(aligned_size(filed.nbytes))
        filed.read = self.spool.read(filed.start, bytes_of(filed.slot.bytes))
        self.read += filed.nbytes

    def await_read(self, filed: Filed) -> None:
        """Until its bytes are in host memory."""
        self.send_for(filed)
        assert filed.read is not None
        filed.read.result()

    def let_go(self, filed: Filed, copied: torch.cuda.Event | None) -> None:
        """Its bytes are wanted in host memory no more once they are `copied`."""
        slot, filed.slot = filed.slot, None
        assert slot is not None
        if copied is None:
            self._give(slot)
        else:
            self.leaving.append((slot, self.behind.submit(copied.synchronize)))

    def forget(self, filed: Filed) -> None:
        """Nobody wants it any more; its place is free when no request for it is under way. Called from wherever the last
        reference goes, so that it neither waits nor fails."""
        slot, filed.slot = filed.slot, None
        if slot is not None:
            self.leaving.append((slot, filed.read or _done()))
        self.forgotten.append(filed)

    # -- room --------------------------------------------------------------------------------------------

    def _memory(self, nbytes: int) -> Slot:
        """Host memory; as long as there is more of it than `limit`, what leaves it is waited for, the oldest first."""
        while self.leaving and (self.leaving[0][1].done() or self.passing + nbytes > self.limit):
            slot, gone = self.leaving.popleft()
            gone.result()
            self._give(slot)
        self.passing += nbytes
        self.most = max(self.most, self.passing)
        return self.slots.take(nbytes)

    def _give(self, slot: Slot) -> None:
        self.passing -= slot.bytes.numel()
        self.slots.give(slot)

    def _place(self, nbytes: int) -> int:
        """Where so many bytes begin in the file, which grows if it must."""
        for filed in [self.forgotten.popleft() for _ in range(len(self.forgotten))]:
            if filed.at_rest:
                self.holes.give(filed.start, filed.start + aligned_size(filed.nbytes))
            else:
                self.forgotten.append(filed)
        start = self.holes.take(nbytes)
        if start is None:
            end = self.spool.nbytes
            self.spool.grow(max(nbytes, GROWTH))
            self.holes.give(end, self.spool.nbytes)
            start = self.holes.take(nbytes)
        assert start is not None
        return start


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
