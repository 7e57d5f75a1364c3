"""Shards in a file: read ahead in the order in which units are gathered, new parameters written behind.

A shard lies there as its pieces, in the order of the unit's flat memory, then what is frozen. A step gathers units in
the order in which the last one did, so that the next shards are read while this one is used; who gathers in another
order waits for its own read. A shard is not read between the moment at which its update is announced and the moment at
which its last new piece is written.
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

from fullshard.direct_io import aligned_size
from fullshard.on_torch.offload.events import DONE, Moment, Stream
from fullshard.on_torch.offload.stores.disk_state import through
from fullshard.on_torch.offload.units import Away, Piece
from fullshard.storage.disk import Spool
from fullshard.storage.host import Arena, bytes_of
from fullshard.update_pieces import READ_SLOTS, WRITE_SLOTS, filed

PATIENCE = 1.0  # seconds between looks at whether those who are waited for are well


@dataclass(eq=False)
class Shelf:
    """Pinned memory for one unit's shard; free for the next after `free`, and after what is being read into it."""

    memory: Tensor
    free: Moment = DONE
    reading: Future[None] | None = None


@dataclass(eq=False)
class Read:
    """A shard on its way to a shelf."""

    away: Away
    shelf: Shelf
    there: Future[None] = field(default_factory=Future)
    dropped: bool = False


class Filed:
    """The shards of the units whose parameters rest on disk."""

    def __init__(self, units: list[Away], dtype: torch.dtype, directory: Path, arena: Arena, largest: int):
        self.units, self.dtype = units, dtype
        self.sizes = {id(a): filed(a.elements, a.moving, dtype.itemsize) for a in units}
        self.starts: dict[int, int] = {}  # of units in the file
        self.offsets: dict[int, int] = {}  # of pieces in their unit
        end = 0
        for away in units:
            self.starts[id(away)], at = end, 0
            for piece in away.pieces:
                self.offsets[piece.number] = at
                at += aligned_size(piece.elements * dtype.itemsize)
            end += self.sizes[id(away)]
        self.spool = Spool(directory, "params", end)
        self.free = deque(Shelf(arena.take(max(self.sizes.values()))) for _ in range(READ_SLOTS))
        self.windows = [arena.take(aligned_size(largest * dtype.itemsize)) for _ in range(WRITE_SLOTS)]
        self.lock = threading.Condition()
        self.order: list[Away] = []  # in which the last step gathered
        self.seen: list[Away] = []  # in which this one has gathered so far
        self.at = 0  # what is read next, in `order`
        self.ahead: deque[Read] = deque()
        self.due: dict[int, int] = {}  # by unit: pieces that are not written yet
        self.fresh: dict[int, Future[None]] = {}  # by unit: its last update is in the file
        self.reader, self.writer = ThreadPoolExecutor(1, "read-ahead"), ThreadPoolExecutor(1, "write-behind")
        self.failed: BaseException | None = None
        self.look: Callable[[], None] = lambda: None  # raises if those who update are in trouble
        self.read_bytes = self.written_bytes = 0

    # -- gathers -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: those who gathered since the last one, as an evaluation does, set no order."""
        self.seen = []
        if self.at != len(self.ahead):  # somebody gathered
            self._aim(0)

    def rewind(self) -> None:
        """A step's last gather was; the next one will follow the same order, from the start."""
        self.order, self.seen = self.seen or self.order, []
        self._aim(0)

    def fetch(self, away: Away) -> Shelf:
        """The unit's shard in pinned memory, until it is put back."""
        self.seen.append(away)
        if not self.ahead or self.ahead[0].away is not away:
            self._aim(next((i for i, a in enumerate(self.order) if a is away), len(self.order)))
        if not self.ahead:  # an order that does not know it
            self._read(away)
        read = self.ahead.popleft()
        self._wait(read.there)
        return read.shelf

    def put_back(self, shelf: Shelf, free: Moment) -> None:
        shelf.free = free
        self.free.append(shelf)
        self._read_on()

    def _aim(self, at: int) -> None:
        """Read ahead from this place in the order on, and nothing else."""
        for read in self.ahead:
            read.dropped = True
            self.free.append(read.shelf)
        self.ahead.clear()
        self.at = at
        self._read_on()

    def _read_on(self) -> None:
        while self.free and self.at < len(self.order):
            self._read(self.order[self.at])
            self.at += 1

    def _read(self, away: Away) -> None:
        read = Read(away, self.free.popleft())
        self.ahead.append(read)
        fresh = self.fresh.get(id(away))
        if fresh is None:
            self.reader.submit(self._start, read)
        else:
            fresh.add_done_callback(partial(self._read_fresh, read))

    def _read_fresh(self, read: Read, fresh: Future[None]) -> None:
        if error := fresh.exception():
            read.there.set_exception(error)
        else:
            self.reader.submit(self._start, read)

    def _start(self, read: Read) -> None:
        """On a thread of its own, which waits until the shelf is free."""
        if read.dropped:
            return
        try:
            read.shelf.free.wait()
            if read.shelf.reading is not None:
                wait([read.shelf.reading])
            nbytes = self.sizes[id(read.away)]
            read.shelf.reading = self.spool.read(self.starts[id(read.away)], bytes_of(read.shelf.memory[:nbytes]))
            self.read_bytes += nbytes
            read.shelf.reading.add_done_callback(partial(_pass_on, read.there))
        except BaseException as error:
            read.there.set_exception(error)

    def parts(self, away: Away, shelf: Shelf) -> list[tuple[int, int, Tensor]]:
        """(parameter, where in this rank's part of it, values) of everything on a shelf."""
        found = []
        for piece in away.pieces:
            flat = self._flat(shelf.memory, self.offsets[piece.number], piece.elements)
            found += [(s.parameter, s.start, flat[s.offset : s.offset + s.stop - s.start]) for s in piece.segments]
        frozen = self._flat(shelf.memory, self._frozen(away), away.elements - away.moving)
        for i, (low, high) in list(enumerate(away.spans))[away.trained :]:
            found.append((i, 0, frozen[low - away.moving : high - away.moving]))
        return found

    def _flat(self, memory: Tensor, at: int, elements: int) -> Tensor:
        return memory[at : at + elements * self.dtype.itemsize].view(self.dtype)

    def _frozen(self, away: Away) -> int:
        return self.sizes[id(away)] - aligned_size((away.elements - away.moving) * self.dtype.itemsize)

    # -- updates -------------------------------------------------------------------------------------------

    def renew(self, units: list[Away]) -> None:
        """These will be updated: each of their pieces is emitted or skipped, and until then none is read."""
        with self.lock:
            for away in units:
                if away.pieces:
                    self.due[id(away)], self.fresh[id(away)] = len(away.pieces), Future()

    def emit(self, piece: Piece, values: Tensor, stream: Stream) -> Moment:
        """New parameters of a piece, to the file; the moment at which they are on the host."""
        with self.lock:
            self.lock.wait_for(lambda: self.failed or self.windows)
            if self.failed:
                raise self.failed
            window = self.windows.pop()
        self._flat(window, 0, piece.elements).copy_(values, non_blocking=True)
        moment = stream.moment()
        self.writer.submit(self._write, piece, window, moment)
        return moment

    def _write(self, piece: Piece, window: Tensor, moment: Moment) -> None:
        away, nbytes = piece.away, aligned_size(piece.elements * self.dtype.itemsize)
        try:
            moment.wait()
            self.spool.write(self.starts[id(away)] + self.offsets[piece.number], bytes_of(window[:nbytes])).result()
        except BaseException as error:
            with self.lock:  # nobody may wait for a window that does not come back
                self.failed = error
                self.lock.notify_all()
            self.fresh[id(away)].set_exception(error)
            return
        self.written_bytes += nbytes
        with self.lock:
            self.windows.append(window)
            self.lock.notify()
        self.skip(piece)

    def skip(self, piece: Piece) -> None:
        """Nothing more of this piece's update will reach the file."""
        with self.lock:
            self.due[id(piece.away)] -= 1
            last = not self.due[id(piece.away)]
            fresh = self.fresh[id(piece.away)]
        if last and not fresh.done():
            fresh.set_result(None)

    def settle(self) -> None:
        """Wait until every update is in the file, and what is read ahead is there."""
        for fresh in list(self.fresh.values()):
            self._wait(fresh)
        for read in self.ahead:
            self._wait(read.there)

    def _wait(self, future: Future[None]) -> None:
        while True:
            try:
                return future.result(PATIENCE)
            except TimeoutError:
                if self.failed:
                    raise self.failed from None
                self.look()

    # -- whole units -----------------------------------------------------------------------------------------

    def publish(self, away: Away, master: Tensor) -> None:
        """A new shard from a unit's whole master."""
        start = self.starts[id(away)]
        for piece in away.pieces:
            through(self.spool, start + self.offsets[piece.number], master[piece.start : piece.stop].to(self.dtype), write=True)
        through(self.spool, start + self._frozen(away), master[away.moving :].to(self.dtype), write=True)
        self._aim(len(self.order))

    def close_file(self) -> None:
        self.reader.shutdown()
        self.writer.shutdown()
        self.spool.close()


def _pass_on(there: Future[None], done: Future[None]) -> None:
    if error := done.exception():
        there.set_exception(error)
    else:
        there.set_result(None)
