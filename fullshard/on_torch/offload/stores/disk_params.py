"""Shards in a file: read ahead in the order in which units are gathered, new parameters written behind.

The file has each shard as its pieces, in the order of the unit's flat memory, then the frozen parameters. A step gathers
units in the order of the last step, so that the next shards are read while this one is used. A gather out of that order
waits for its own read. A shard is not read between the announcement of its update (`renew`) and the write of its last piece.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fullshard.base.direct_io import aligned_size
from fullshard.on_torch.offload.stores.disk_state import copy_through
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit, Piece
from fullshard.on_torch.offload.units.store_protocols import ShardPart
from fullshard.on_torch.tensors.streams import DONE, DeviceStream, StreamEvent
from fullshard.plan.update_pieces import READ_SLOTS, WRITE_SLOTS, shard_file_bytes
from fullshard.storage.disk_file import DiskFile
from fullshard.storage.pinned_arena import Arena, bytes_of

CHECK_EVERY = 1.0  # seconds between looks for an error of the lanes that are waited for


@dataclass(eq=False)
class ShardBuffer:
    """Pinned memory for one unit's shard. The next read into it waits for `free` and for the last read."""

    memory: Tensor
    free: StreamEvent = DONE
    reading: Future[None] | None = None


@dataclass(eq=False)
class ShardRead:
    """A shard that is being read into a buffer."""

    shards: "DiskParameters"
    buffer: ShardBuffer
    done: Future[None] = field(default_factory=Future)
    dropped: bool = False


class ParameterFile:
    """The file of all units whose parameters have their home on disk, and the buffers before it."""

    def __init__(self, units: list[OffloadedUnit], dtype: torch.dtype, directory: Path, arena: Arena, largest: int):
        self.dtype = dtype
        sizes = [shard_file_bytes(u.elements, u.moving, dtype.itemsize) for u in units]
        self.stores: dict[str, DiskParameters] = {}  # by unit
        end = 0
        for unit, size in zip(units, sizes, strict=True):
            self.stores[unit.name] = DiskParameters(unit, self, end, size)
            end += size
        self.file = DiskFile(directory, "params", end)
        self.free = deque(ShardBuffer(arena.take(max(sizes))) for _ in range(READ_SLOTS))
        self.write_buffers = [arena.take(aligned_size(largest * dtype.itemsize)) for _ in range(WRITE_SLOTS)]
        self.lock = threading.Condition()
        self.order: list[DiskParameters] = []  # in which the last step gathered
        self.seen: list[DiskParameters] = []  # in which this step has gathered so far
        self.at = 0  # the next to be read, in `order`
        self.ahead: deque[ShardRead] = deque()
        self.reader, self.writer = ThreadPoolExecutor(1, "read-ahead"), ThreadPoolExecutor(1, "write-behind")
        self.failed: BaseException | None = None
        self.check_lanes: Callable[[], None] = lambda: None  # raises if a lane has failed
        self.read_bytes = self.written_bytes = 0

    # -- gathers -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins. Gathers since the last step, as of an evaluation, do not count for the order."""
        self.seen = []
        if self.at != len(self.ahead):  # something was gathered
            self.read_from(0)

    def rewind(self) -> None:
        """A step has gathered for the last time; the next one will follow the same order, from the start."""
        self.order, self.seen = self.seen or self.order, []
        self.read_from(0)

    def fetch(self, shards: "DiskParameters") -> ShardBuffer:
        """A unit's shard in pinned memory, until it is put back."""
        self.seen.append(shards)
        if not self.ahead or self.ahead[0].shards is not shards:
            self.read_from(next((i for i, s in enumerate(self.order) if s is shards), len(self.order)))
        if not self.ahead:  # the unit is not in the order
            self._read(shards)
        read = self.ahead.popleft()
        self.wait(read.done)
        return read.buffer

    def put_back(self, buffer: ShardBuffer, free: StreamEvent) -> None:
        buffer.free = free
        self.free.append(buffer)
        self._read_on()

    def read_from(self, at: int) -> None:
        """Read ahead from this place in the order on, and nothing else."""
        for read in self.ahead:
            read.dropped = True
            self.free.append(read.buffer)
        self.ahead.clear()
        self.at = at
        self._read_on()

    def _read_on(self) -> None:
        while self.free and self.at < len(self.order):
            self._read(self.order[self.at])
            self.at += 1

    def _read(self, shards: "DiskParameters") -> None:
        read = ShardRead(shards, self.free.popleft())
        self.ahead.append(read)
        if shards.written is None:
            self.reader.submit(self._start, read)
        else:
            shards.written.add_done_callback(partial(self._read_written, read))

    def _read_written(self, read: ShardRead, written: Future[None]) -> None:
        if error := written.exception():
            read.done.set_exception(error)
        else:
            self.reader.submit(self._start, read)

    def _start(self, read: ShardRead) -> None:
        """On a thread of its own, which waits until the buffer is free."""
        if read.dropped:
            return
        shards, buffer = read.shards, read.buffer
        try:
            buffer.free.wait()
            if buffer.reading is not None:
                wait([buffer.reading])
            buffer.reading = self.file.read(shards.start, bytes_of(buffer.memory[: shards.nbytes]))
            self.read_bytes += shards.nbytes
            buffer.reading.add_done_callback(partial(_pass_on, read.done))
        except BaseException as error:
            read.done.set_exception(error)

    # -- updates -------------------------------------------------------------------------------------------

    def take_buffer(self) -> Tensor:
        """Memory for a piece's new parameters; waits until there is some."""
        with self.lock:
            self.lock.wait_for(lambda: self.failed or self.write_buffers)
            if self.failed:
                raise self.failed
            return self.write_buffers.pop()

    def write(self, shards: "DiskParameters", piece: Piece, memory: Tensor, filled: StreamEvent) -> None:
        """Write a buffer once it is filled; on the writer's thread."""
        nbytes = aligned_size(piece.elements * self.dtype.itemsize)
        try:
            filled.wait()
            self.file.write(shards.start + shards.offsets[piece.number], bytes_of(memory[:nbytes])).result()
        except BaseException as error:
            with self.lock:  # its buffer does not come back: nobody may wait for it
                self.failed = error
                self.lock.notify_all()
            assert shards.written is not None
            shards.written.set_exception(error)
            return
        self.written_bytes += nbytes
        with self.lock:
            self.write_buffers.append(memory)
            self.lock.notify()
        shards.skip(piece)

    def settle(self) -> None:
        """Wait until every update is in the file, and every read ahead is done."""
        for shards in self.stores.values():
            if shards.written is not None:
                self.wait(shards.written)
        for read in self.ahead:
            self.wait(read.done)

    def wait(self, future: Future[None]) -> None:
        while True:
            try:
                return future.result(CHECK_EVERY)
            except TimeoutError:
                if self.failed:
                    raise self.failed from None
                self.check_lanes()

    def close_file(self) -> None:
        self.reader.shutdown()
        self.writer.shutdown()
        self.file.close()


class DiskParameters:
    """One unit's shards: `nbytes` of the file from `start` on."""

    on_device = False

    def __init__(self, unit: OffloadedUnit, file: ParameterFile, start: int, nbytes: int):
        self.unit, self.file, self.start, self.nbytes = unit, file, start, nbytes
        self.offsets: dict[int, int] = {}  # of pieces, from `start`
        at = 0
        for piece in unit.pieces:
            self.offsets[piece.number] = at
            at += aligned_size(piece.elements * file.dtype.itemsize)
        self.frozen = at  # where the frozen parameters begin, from `start`
        self.due = 0  # pieces of this update that are not written yet
        self.written: Future[None] | None = None  # the last update is in the file

    def segments(self, piece: Piece) -> list[Tensor]:
        raise AssertionError(f"the shards of {self.unit.name} are on disk, not in memory")

    def renew(self) -> None:
        with self.file.lock:
            if self.unit.pieces:
                self.due, self.written = len(self.unit.pieces), Future()

    def write(self, piece: Piece, values: Tensor, stream: DeviceStream) -> StreamEvent:
        memory = self.file.take_buffer()
        self._flat(memory, 0, piece.elements).copy_(values, non_blocking=True)
        event = stream.record()
        self.file.writer.submit(self.file.write, self, piece, memory, event)
        return event

    def skip(self, piece: Piece) -> None:
        """One piece fewer of this update will reach the file."""
        with self.file.lock:
            self.due -= 1
            last, written = not self.due, self.written
        assert written is not None
        if last and not written.done():
            written.set_result(None)

    def send(self, copy: Callable[[list[ShardPart]], StreamEvent]) -> StreamEvent:
        buffer = self.file.fetch(self)
        event = copy(self._parts(buffer.memory))
        self.file.put_back(buffer, event)
        return event

    def publish(self, master: Tensor) -> None:
        for piece in self.unit.pieces:
            values = master[piece.start : piece.stop].to(self.file.dtype)
            copy_through(self.file.file, self.start + self.offsets[piece.number], values, write=True)
        frozen = master[self.unit.moving :].to(self.file.dtype)
        copy_through(self.file.file, self.start + self.frozen, frozen, write=True)
        self.file.read_from(len(self.file.order))

    def _parts(self, memory: Tensor) -> list[ShardPart]:
        """Everything in a buffer."""
        unit, found = self.unit, []
        for piece in unit.pieces:
            flat = self._flat(memory, self.offsets[piece.number], piece.elements)
            found += [(s.parameter, s.start, flat[s.offset : s.offset + s.stop - s.start]) for s in piece.segments]
        frozen = self._flat(memory, self.frozen, unit.elements - unit.moving)
        for i, (low, high) in list(enumerate(unit.spans))[unit.trained :]:
            found.append((i, 0, frozen[low - unit.moving : high - unit.moving]))
        return found

    def _flat(self, memory: Tensor, at: int, elements: int) -> Tensor:
        return memory[at : at + elements * self.file.dtype.itemsize].view(self.file.dtype)


def _pass_on(result: Future[None], done: Future[None]) -> None:
    if error := done.exception():
        result.set_exception(error)
    else:
        result.set_result(None)
