"""Master and moments in a file, with a few pinned buffers before it: pieces are read ahead and written behind.

Pieces are read in the order in which they are expected, as buffers come free. A piece is written back when its new values
have reached the host. Opening a piece waits for its own read only.
"""

import itertools
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fullshard.base.direct_io import ALIGNMENT, aligned, aligned_size
from fullshard.on_torch.offload.stores.state_layout import StateLayout
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit, Piece
from fullshard.on_torch.optimizers.decoded_moment import DecodedMoment
from fullshard.on_torch.tensors.streams import DONE, StreamEvent
from fullshard.plan.update_pieces import DISK_SLOTS
from fullshard.storage.disk_file import DiskFile, mapped_memory
from fullshard.storage.pinned_arena import Arena, bytes_of

SCRATCH = 64 << 20  # bytes at a time, where whole units are read or written

Buffers = list[Tensor]  # bytes for the master and each moment of a piece


class StateFile:
    """The file of all units whose optimizer state has its home on disk."""

    def __init__(self, units: list[OffloadedUnit], layout: StateLayout, directory: Path, arena: Arena, largest: int):
        self.layout = layout
        self.offsets: dict[int, list[int]] = {}  # by piece: where its master and moments begin in the file
        end = 0
        for piece in (p for u in units for p in u.pieces):
            *starts, end = itertools.accumulate(self._sizes(piece), initial=end)
            self.offsets[piece.number] = starts
        self.frozen: dict[str, int] = {}  # by unit: where the master of its frozen parameters begins
        for unit in units:
            self.frozen[unit.name] = end
            end += aligned_size((unit.elements - unit.moving) * layout.master.itemsize)
        self.file = DiskFile(directory, "optimizer", end)
        self.free = [[arena.take(aligned_size(n)) for n in layout.nbytes(largest)] for _ in range(DISK_SLOTS)]
        self.lock = threading.Condition()
        self.expected: deque[Piece] = deque()
        self.opened: dict[int, tuple[Buffers, list[Future[None]]]] = {}
        self.writing: dict[int, Future[None]] = {}  # by piece: the write of its last change
        self.writer = ThreadPoolExecutor(1, "write-behind")
        self.read_bytes = self.written_bytes = 0
        self.failed: Exception | None = None

    def _sizes(self, piece: Piece) -> list[int]:
        """Bytes of the piece's master and moments, in whole pages."""
        return [aligned_size(n) for n in self.layout.nbytes(piece.elements)]

    def expect(self, pieces: list[Piece]) -> None:
        with self.lock:
            self.expected.extend(pieces)
        self._read_ahead()

    def _read_ahead(self) -> None:
        """As far as there are buffers. A piece that is still open, from the step before, is read when it is closed and
        written: its new parameters, which the next step waits for, are there before its state is back."""
        while True:
            with self.lock:
                if not (self.expected and self.free) or self.expected[0].number in self.opened:
                    return
                piece, buffers = self.expected.popleft(), self.free.pop()
                written = self.writing.get(piece.number)
            if written is None or written.done():
                self._read(piece, buffers)
            else:
                written.add_done_callback(partial(self._read_after, piece, buffers))

    def _read_after(self, piece: Piece, buffers: Buffers, _: Future[None]) -> None:
        self._read(piece, buffers)

    def _read(self, piece: Piece, buffers: Buffers) -> None:
        sizes = self._sizes(piece)
        parts = zip(self.offsets[piece.number], buffers, sizes, strict=True)
        reads = [self.file.read(at, bytes_of(memory[:size])) for at, memory, size in parts]
        with self.lock:
            self.read_bytes += sum(sizes)
            self.opened[piece.number] = (buffers, reads)
            self.lock.notify_all()

    def open(self, piece: Piece) -> tuple[list[Tensor], StreamEvent]:
        with self.lock:
            self.lock.wait_for(lambda: self.failed or piece.number in self.opened)
            if self.failed:
                raise self.failed
            buffers, reads = self.opened[piece.number]
        for read in reads:
            read.result()
        parts = zip(buffers, self.layout.nbytes(piece.elements), self.layout.dtypes, strict=True)
        return [memory[:size].view(dtype) for memory, size, dtype in parts], DONE

    def close(self, piece: Piece, changed: StreamEvent | None) -> None:
        with self.lock:  # whoever opens the piece from here on waits for another read, and that for the write
            buffers, _ = self.opened.pop(piece.number)
            if changed is not None:
                self.writing[piece.number] = self.writer.submit(self._write, piece, buffers, changed)
        if changed is None:
            self._free(buffers)

    def _write(self, piece: Piece, buffers: Buffers, changed: StreamEvent) -> None:
        changed.wait()
        sizes = self._sizes(piece)
        parts = zip(self.offsets[piece.number], buffers, sizes, strict=True)
        try:
            for write in [self.file.write(at, bytes_of(memory[:size])) for at, memory, size in parts]:
                write.result()
        except Exception as error:
            with self.lock:  # its buffers do not come back: nobody may wait for them
                self.failed = error
                self.lock.notify_all()
            raise
        self.written_bytes += sum(sizes)
        self._free(buffers)

    def _free(self, buffers: Buffers) -> None:
        with self.lock:
            self.free.append(buffers)
        self._read_ahead()

    def settle(self) -> None:
        for writing in list(self.writing.values()):
            writing.result()

    def close_file(self) -> None:
        self.writer.shutdown()
        self.file.close()


class DiskState:
    """One unit's master and moments in the file."""

    def __init__(self, unit: OffloadedUnit, file: StateFile):
        self.unit, self.file, self.layout = unit, file, file.layout
        self.expect, self.open, self.close, self.settle = file.expect, file.open, file.close, file.settle  # of any unit's pieces
        self.flats: list[Tensor] | None = None  # the whole unit in memory, between `whole` and `give_back`
        self.first: Tensor | None = None  # its initial master, until it is stored

    def initial(self) -> Tensor:
        """Mapped memory: all units have theirs at once, more than the host may have room for."""
        if self.first is None:
            path, master = self.file.file.path, self.layout.shown[0]
            nbytes = self.unit.elements * master.itemsize
            if not nbytes:  # of two ranks one has no part of a scalar
                self.first = torch.empty(0, dtype=master)
            else:
                self.first = torch.frombuffer(mapped_memory(path.parent, "initial", nbytes), dtype=master)
        return self.first

    def whole(self) -> list[Tensor]:
        if self.first is not None:
            moments = zip(self._sizes()[1:], self.layout.shown[1:], strict=True)
            self.flats, self.first = [self.first, *(torch.zeros(n, dtype=d) for n, d in moments)], None
        self.flats = self.flats or self._read_unit()
        return self.flats

    def shapes(self) -> list[Tensor]:
        return [torch.empty(n, dtype=d, device="meta") for n, d in zip(self._sizes(), self.layout.shown, strict=True)]

    def give_back(self, *, changed: bool) -> None:
        flats, self.flats = self.flats, None
        if changed and flats is not None:
            for piece in self.unit.pieces:
                values = [flat[piece.start : piece.stop] for flat in flats]
                stored = values
                if self.layout.moments.coded:
                    stored = [values[0], *self._empty(piece)[1:]]
                    self.layout.encode(values, stored)
                for at, part in zip(self.file.offsets[piece.number], stored, strict=True):
                    copy_through(self.file.file, at, part, write=True)
            copy_through(self.file.file, self._frozen(), flats[0][self.unit.moving :], write=True)

    def stored(self, which: int, parameter: int) -> "StoredTensor | DecodedMoment":
        if which and self.layout.moments.coded:
            return DecodedMoment(partial(self._raw, which, self.unit.starts[parameter]), self.layout.moments, which == 1)
        return StoredTensor(self, which, parameter)

    def _raw(self, which: int, first: int, low: int, high: int) -> Tensor:
        """The stored bytes of a moment, from one element of a parameter to another."""
        size = self.layout.moments.size
        start, into = size(first + low), torch.empty(size(high - low), dtype=torch.uint8)
        self.read(which, start, into)
        return into

    def read(self, which: int, start: int, into: Tensor) -> None:
        """Bytes of the flat master (0) or of a moment, as it is stored, from `start` on, through little memory."""
        end, sizes = start + len(into), self.layout.nbytes
        places = [(sizes(p.start)[which], sizes(p.stop)[which], self.file.offsets[p.number][which]) for p in self.unit.pieces]
        places += [(sizes(self.unit.moving)[0], sizes(self.unit.elements)[0], self._frozen())] if which == 0 else []
        for first, last, at in places:
            low, high = max(first, start), min(last, end)
            if low < high:
                self._read_bytes(at + low - first, into[low - start : high - start])

    def _read_bytes(self, at: int, into: Tensor) -> None:
        """From anywhere in the file."""
        scratch = torch.frombuffer(aligned(min(SCRATCH, len(into)) + ALIGNMENT), dtype=torch.uint8)
        for start in range(0, len(into), SCRATCH):
            part, skip = into[start : start + SCRATCH], (at + start) % ALIGNMENT
            memory = scratch[: aligned_size(skip + len(part))]
            self.file.file.read(at + start - skip, bytes_of(memory)).result()
            part.copy_(memory[skip : skip + len(part)])

    def _read_unit(self) -> list[Tensor]:
        flats = [torch.empty(n, dtype=d) for n, d in zip(self._sizes(), self.layout.shown, strict=True)]
        for piece in self.unit.pieces:
            values = [flat[piece.start : piece.stop] for flat in flats]
            stored = [values[0], *self._empty(piece)[1:]] if self.layout.moments.coded else values
            for at, part in zip(self.file.offsets[piece.number], stored, strict=True):
                copy_through(self.file.file, at, part, write=False)
            if self.layout.moments.coded:
                for target, part in zip(values[1:], self.layout.decoded(stored, piece.elements)[1:], strict=True):
                    target.copy_(part)
        copy_through(self.file.file, self._frozen(), flats[0][self.unit.moving :], write=False)
        return flats

    def _sizes(self) -> list[int]:
        """Elements of the flat master and of each moment."""
        return [self.unit.elements, *[self.unit.moving] * self.layout.slots]

    def _empty(self, piece: Piece) -> list[Tensor]:
        """Memory for a piece's master and moments, as they are stored."""
        lengths = self.layout.lengths(piece.elements, piece.elements)
        return [torch.empty(n, dtype=d) for n, d in zip(lengths, self.layout.dtypes, strict=True)]

    def _frozen(self) -> int:
        return self.file.frozen[self.unit.name]


@dataclass(frozen=True)
class StoredTensor:
    """This rank's part of one parameter's master or moment, in the file."""

    state: DiskState
    which: int
    parameter: int

    def read(self, start: int, into: Tensor) -> None:
        """Fill `into` with its bytes from `start` on."""
        first = self.state.layout.nbytes(self.state.unit.starts[self.parameter])[self.which]
        self.state.read(self.which, first + start, into)


def copy_through(file: DiskFile, at: int, values: Tensor, *, write: bool) -> None:
    """Write a tensor to a file or read it back, through aligned memory: its own need not be aligned."""
    scratch = torch.frombuffer(aligned(min(SCRATCH, max(1, values.nbytes))), dtype=torch.uint8)
    step = len(scratch)
    raw = values.view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)
    for start in range(0, len(raw), step):
        part = raw[start : start + step]
        memory = scratch[: aligned_size(len(part))]
        if write:
            memory[: len(part)] = part
            file.write(at + start, bytes_of(memory)).result()
        else:
            file.read(at + start, bytes_of(memory)).result()
            part.copy_(memory[: len(part)])
