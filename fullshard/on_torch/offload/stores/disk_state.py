"""Master and moments in a file: a window of pinned slots over it, read ahead and written behind.

Pieces are read in the order in which they are expected, as slots come free, and written back when their new values
have reached the host. Who opens a piece waits for its read and for nothing else.
"""

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fullshard.direct_io import ALIGNMENT, aligned, aligned_size
from fullshard.on_torch.offload.events import DONE, Moment
from fullshard.on_torch.offload.kernels.adam import Rule
from fullshard.on_torch.offload.units import Away, Piece
from fullshard.storage.disk import Spool
from fullshard.storage.host import Arena, bytes_of
from fullshard.update_pieces import DISK_SLOTS

SCRATCH = 64 << 20  # bytes at a time, where whole units are read or written


@dataclass(frozen=True)
class Stored:
    """This rank's part of one parameter's master or moment, in the file."""

    spooled: "Spooled"
    away: Away
    which: int
    parameter: int

    def read(self, start: int, into: Tensor) -> None:
        """Its bytes from `start` on."""
        first = self.away.spans[self.parameter][0] * self.spooled.dtype.itemsize
        self.spooled.read(self.away, self.which, first + start, into)


Window = list[Tensor]  # bytes for the master and each moment of a piece


class Spooled:
    """The state of the units whose optimizer rests on disk."""

    def __init__(self, units: list[Away], rule: Rule, dtype: torch.dtype, directory: Path, arena: Arena, largest: int):
        self.units, self.rule, self.dtype = units, rule, dtype
        self.offsets: dict[int, list[int]] = {}  # by piece: where its master and moments begin in the file
        end = 0
        for piece in (p for a in units for p in a.pieces):
            size = aligned_size(piece.elements * dtype.itemsize)
            self.offsets[piece.number] = [end + i * size for i in range(1 + rule.slots)]
            end += (1 + rule.slots) * size
        self.frozen: dict[int, int] = {}  # where the master of a unit's frozen parameters begins
        for away in units:
            self.frozen[id(away)] = end
            end += aligned_size((away.elements - away.moving) * dtype.itemsize)
        self.spool = Spool(directory, "optimizer", end)
        size = aligned_size(largest * dtype.itemsize)
        self.free = [[arena.take(size) for _ in range(1 + rule.slots)] for _ in range(DISK_SLOTS)]
        self.lock = threading.Condition()
        self.expected: deque[Piece] = deque()
        self.open_now: dict[int, tuple[Window, list[Future[None]]]] = {}
        self.writing: dict[int, Future[None]] = {}  # by piece: the last change on its way to the disk
        self.behind = ThreadPoolExecutor(1, "write-behind")
        self.flats: dict[int, list[Tensor]] = {}  # whole units, while somebody looks at them
        self.read_bytes = self.written_bytes = 0
        self.failed: Exception | None = None

    # -- pieces --------------------------------------------------------------------------------------------

    def expect(self, pieces: list[Piece]) -> None:
        with self.lock:
            self.expected.extend(pieces)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """As far as there are slots. A piece that is still open, from the step before, is read when it is closed and written:
        its new parameters, which the next step waits for, are there before its state is back."""
        while True:
            with self.lock:
                if not (self.expected and self.free) or self.expected[0].number in self.open_now:
                    return
                piece, window = self.expected.popleft(), self.free.pop()
                written = self.writing.get(piece.number)
            if written is None or written.done():
                self._read(piece, window)
            else:
                written.add_done_callback(partial(self._read_after, piece, window))

    def _read_after(self, piece: Piece, window: Window, _: Future[None]) -> None:
        self._read(piece, window)

    def _read(self, piece: Piece, window: Window) -> None:
        size = aligned_size(piece.elements * self.dtype.itemsize)
        starts = self.offsets[piece.number]
        reads = [self.spool.read(at, bytes_of(memory[:size])) for at, memory in zip(starts, window, strict=True)]
        with self.lock:
            self.read_bytes += len(reads) * size
            self.open_now[piece.number] = (window, reads)
            self.lock.notify_all()

    def open(self, piece: Piece) -> tuple[list[Tensor], Moment]:
        with self.lock:
            self.lock.wait_for(lambda: self.failed or piece.number in self.open_now)
            if self.failed:
                raise self.failed
            window, reads = self.open_now[piece.number]
        for read in reads:
            read.result()
        return [memory[: piece.elements * self.dtype.itemsize].view(self.dtype) for memory in window], DONE

    def close(self, piece: Piece, changed: Moment | None) -> None:
        with self.lock:  # from here on, who opens the piece waits for another read, and that for the write
            window, _ = self.open_now.pop(piece.number)
            if changed is not None:
                self.writing[piece.number] = self.behind.submit(self._write, piece, window, changed)
        if changed is None:
            self._let_go(window)

    def _write(self, piece: Piece, window: Window, changed: Moment) -> None:
        changed.wait()
        size = aligned_size(piece.elements * self.dtype.itemsize)
        starts = self.offsets[piece.number]
        try:
            for write in [self.spool.write(at, bytes_of(memory[:size])) for at, memory in zip(starts, window, strict=True)]:
                write.result()
        except Exception as error:
            with self.lock:  # nobody may wait for a slot that does not come back
                self.failed = error
                self.lock.notify_all()
            raise
        self.written_bytes += len(starts) * size
        self._let_go(window)

    def _let_go(self, window: Window) -> None:
        with self.lock:
            self.free.append(window)
        self._read_ahead()

    def settle(self) -> None:
        for writing in list(self.writing.values()):
            writing.result()

    # -- whole units -----------------------------------------------------------------------------------------

    def borrow(self, away: Away) -> list[Tensor]:
        """A unit's master and moments in memory, until they are given back."""
        if id(away) not in self.flats:
            self.flats[id(away)] = self._read_unit(away)
        return self.flats[id(away)]

    def fresh(self, away: Away) -> list[Tensor]:
        """Memory for a unit that is not in the file yet."""
        sizes = [away.elements, *[away.moving] * self.rule.slots]
        return self.flats.setdefault(id(away), [torch.zeros(n, dtype=self.dtype) for n in sizes])

    def give_back(self, away: Away, *, changed: bool) -> None:
        flats = self.flats.pop(id(away), None)
        if changed and flats is not None:
            for piece, i, at in self._places(away):
                through(self.spool, at, flats[i][piece.start : piece.stop], write=True)
            through(self.spool, self.frozen[id(away)], flats[0][away.moving :], write=True)

    def read(self, away: Away, which: int, start: int, into: Tensor) -> None:
        """Bytes of a unit's master (0) or of a moment, from `start` on, through little memory."""
        wide, end = self.dtype.itemsize, start + len(into)
        places = [(p.start * wide, p.stop * wide, self.offsets[p.number][which]) for p in away.pieces]
        places += [(away.moving * wide, away.elements * wide, self.frozen[id(away)])] if which == 0 else []
        for first, last, at in places:
            low, high = max(first, start), min(last, end)
            if low < high:
                self._read_bytes(at + low - first, into[low - start : high - start])

    def _read_bytes(self, at: int, into: Tensor) -> None:
        """From anywhere in the file."""
        window = torch.frombuffer(aligned(min(SCRATCH, len(into)) + ALIGNMENT), dtype=torch.uint8)
        for start in range(0, len(into), SCRATCH):
            part, skip = into[start : start + SCRATCH], (at + start) % ALIGNMENT
            memory = window[: aligned_size(skip + len(part))]
            self.spool.read(at + start - skip, bytes_of(memory)).result()
            part.copy_(memory[skip : skip + len(part)])

    def _read_unit(self, away: Away) -> list[Tensor]:
        sizes = [away.elements, *[away.moving] * self.rule.slots]
        flats = [torch.empty(n, dtype=self.dtype) for n in sizes]
        for piece, i, at in self._places(away):
            through(self.spool, at, flats[i][piece.start : piece.stop], write=False)
        through(self.spool, self.frozen[id(away)], flats[0][away.moving :], write=False)
        return flats

    def _places(self, away: Away) -> list[tuple[Piece, int, int]]:
        """(piece, which of master and moments, where it begins in the file)."""
        return [(p, i, at) for p in away.pieces for i, at in enumerate(self.offsets[p.number])]

    def close_file(self) -> None:
        self.behind.shutdown()
        self.spool.close()


def through(spool: Spool, at: int, values: Tensor, *, write: bool) -> None:
    """Between a file and memory that need not be aligned."""
    window = torch.frombuffer(aligned(min(SCRATCH, max(1, values.nbytes))), dtype=torch.uint8)
    step = len(window)
    raw = values.view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)
    for start in range(0, len(raw), step):
        part = raw[start : start + step]
        memory = window[: aligned_size(len(part))]
        if write:
            memory[: len(part)] = part
            spool.write(at + start, bytes_of(memory)).result()
        else:
            spool.read(at + start, bytes_of(memory)).result()
            part.copy_(memory[: len(part)])
