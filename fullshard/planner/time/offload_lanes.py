"""Lanes beside the device's own: PCIe each way, the host's cores, the disk; and updates of state that rests away, laid
onto them piece by piece.

The disk is one lane; where it reads one piece's state while it writes another's, both are as quick as they are at once.
A piece is either streamed (state up, updated by the device, state down) or updated by the cores where it lies (gradient
down, parameter up); while both happen, each is slower than alone. Pieces follow each other through a few slots of
staging, so that the slowest lane sets the pace.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Literal

from fullshard.cluster.cluster import Cluster
from fullshard.plan import Plan
from fullshard.planner.step.offload_bytes import OffloadBytes, PieceSize, pcie_traffic
from fullshard.planner.step.saved_activations import UNITS_IN_TRANSIT
from fullshard.update_pieces import CPU_BUFFERS, DISK_SLOTS, READ_SLOTS, balanced

Lane = Literal["pcie_up", "pcie_down", "cpu", "disk"]
LANES: tuple[Lane, ...] = ("pcie_up", "pcie_down", "cpu", "disk")


def balance(cluster: Cluster, plan: Plan, slots: int) -> float:
    """The share of pieces that the cores update so that they and PCIe are done at about the same time."""
    if cluster.device.kind == "cpu":
        return 0.5  # the same cores do both
    both, cores = rates(cluster, slots, at_once=True)
    streamed, sent = pcie_traffic(plan, slots)
    return balanced(2 * streamed / both, cores, sent / both)


def rates(cluster: Cluster, slots: int, *, at_once: bool) -> tuple[float, float]:
    """Bytes a second over PCIe, the sum of both ways, and seconds a parameter of an update by the cores: as long as AdamW's,
    by the bytes that it moves. `at_once`: while both are at work on the host's memory."""
    both = cluster.of("pcie_beside" if at_once else "pcie_both")
    return both, cluster.of("adamw_beside" if at_once else "adamw") * (3 + 2 * slots) / 7


class Calendar:
    """When a lane is busy. Work takes the free time from when it is ready, around what was laid there before."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def take(self, ready: float, seconds: float) -> float:
        """When work is done that may start at `ready`."""
        if seconds <= 0:
            return ready
        i = bisect_left(self.ends, ready)
        if i < len(self.starts) and self.starts[i] <= ready:
            ready, i = self.ends[i], i + 1
        first, begin, at, left = i, ready, ready, seconds
        while i < len(self.starts) and self.starts[i] - at < left:
            left -= self.starts[i] - at
            at, i = self.ends[i], i + 1
        done = at + left
        self._merge(first, i, begin, done)
        return done

    def _merge(self, first: int, after: int, begin: float, done: float) -> None:
        """Busy without a gap from `begin` to `done`, in place of the entries between; neighbours that touch join in."""
        if first > 0 and self.ends[first - 1] >= begin:
            first -= 1
            begin = self.starts[first]
        if after < len(self.starts) and self.starts[after] <= done:
            done = self.ends[after]
            after += 1
        self.starts[first:after], self.ends[first:after] = [begin], [done]


@dataclass
class Slots:
    """Staging: so many places, taken in turn; None: where pieces are not laid in the order in which they take them."""

    free: deque[float] | None

    @classmethod
    def of(cls, count: int | None) -> "Slots":
        return cls(None if count is None else deque([0.0] * count))

    def take(self) -> float:
        """When the next place is free."""
        return 0.0 if self.free is None else self.free.popleft()

    def give(self, when: float) -> None:
        if self.free is not None:
            self.free.append(when)


class Transfers:
    """What moves between device, host and disk, and the updates of away units."""

    def __init__(self, cluster: Cluster, away: OffloadBytes):
        self.away = away
        self.gpu = cluster.device.kind != "cpu"
        self.lanes = {lane: Calendar() for lane in LANES}
        self.busy: dict[str, float] = {}  # seconds of each lane
        lanes = {p.lane for p in away.pieces if p.home != "device"}
        both, self.core = rates(cluster, away.slots, at_once=len(lanes) > 1)
        # A CPU is its own device: what would cross PCIe is copied.
        copy = cluster.of("dram") / 2
        self.up, self.down = (cluster.of("pcie_up"), cluster.of("pcie_down")) if self.gpu else (copy, copy)
        self.both = both / 2 if self.gpu else copy  # each way, while both are in use
        self.read, self.write = cluster.of("disk_read"), cluster.of("disk_write")
        # Of the seconds that reading and writing take alone, what is left of them while the other goes on as well.
        self.at_once = 2 / cluster.of("disk_both") / (1 / self.read + 1 / self.write)
        self.filed, self.on_disk = 0, sum(p.home == "disk" for p in away.pieces)  # pieces on disk: of this step so far, and all
        self.kernel = (2 * away.state + away.gradient + away.compute) / cluster.of("hbm")
        self.staging = Slots.of(None if away.by_need else away.plan.staging)
        self.files, self.trays = Slots.of(DISK_SLOTS), Slots.of(None if away.by_need else CPU_BUFFERS)
        self.shelves = Slots.of(READ_SLOTS)
        self.passing = Slots.of(UNITS_IN_TRANSIT)  # units' activations on their way to disk
        self.began = 0.0  # the first backward, of updates that wait for a norm, else the last: state may come ahead from then on
        self.drained: dict[str, float] = {}  # when gradients that wait on the host are there
        self.taken: dict[str, float] = {}  # when a unit's gradient on the device has been read
        self.of_unit: dict[str, list[PieceSize]] = {}
        for piece in away.pieces:
            self.of_unit.setdefault(piece.unit, []).append(piece)

    def lay(self, lane: Lane, ready: float, seconds: float) -> float:
        if seconds > 0:
            self.busy[lane] = self.busy.get(lane, 0.0) + seconds
        return self.lanes[lane].take(ready, seconds)

    def fetch(self, nbytes: int, ready: float) -> float:
        """When bytes are on the device."""
        return self.lay("pcie_up", ready, nbytes / self.up)

    def fetch_filed(self, nbytes: int, ready: float, written: float) -> float:
        """The same of a shard on disk, which is read ahead as soon as it is `written` and a shelf is free."""
        read = self.lay("disk", max(self.shelves.take(), written), nbytes / self.read)
        up = self.fetch(nbytes, max(ready, read))
        self.shelves.give(up)
        return up

    def spill(self, nbytes: int, ready: float) -> float:
        """When bytes are on the host."""
        return self.lay("pcie_down", ready, nbytes / self.down)

    def spill_filed(self, nbytes: int, ready: float) -> tuple[float, float]:
        """The same of activations that go on to disk, as soon as those before them have left the host; and when they are
        there."""
        down = self.spill(nbytes, max(ready, self.passing.take()))
        written = self.lay("disk", down, nbytes / self.write)
        self.passing.give(written)
        return down, written

    def read_back(self, nbytes: int, ready: float) -> float:
        """When activations on disk are on the host again."""
        return self.lay("disk", ready, nbytes / self.read)

    def drain(self, unit: str, ready: float) -> float:
        """The gradients that the cores will want; when they are on the host."""
        elements = sum(p.elements for p in self.of_unit.get(unit, []) if p.lane == "cpu")
        self.drained[unit] = self.spill(elements * self.away.gradient, ready)
        return self.drained[unit]

    def update(self, unit: str, ready: float) -> float:
        """When all of a unit's parameters are updated and where they rest, their gradient being there at `ready`."""
        self.taken[unit] = ready
        return max((self._new(p, self._piece(p, ready)) for p in self.of_unit.get(unit, [])), default=ready)

    def _new(self, piece: PieceSize, updated: float) -> float:
        """When a piece's new parameters are where its shard rests."""
        if self.away.groups[piece.unit].home.params != "disk":
            return updated
        return self.lay("disk", updated, piece.elements * self.away.compute / self.write)

    def _piece(self, piece: PieceSize, ready: float) -> float:
        ahead = self.began if self.away.late else ready  # when its state may be sent for
        if piece.home == "host":
            return self._work(piece, ready, ahead)[0]
        state = piece.elements * self.away.state
        self.filed += 1  # the first are read before any is written, the last are written when all have been read
        reading = self.at_once if self.filed > DISK_SLOTS else 1.0
        writing = self.at_once if self.filed <= self.on_disk - DISK_SLOTS else 1.0
        read = self.lay("disk", max(self.files.take(), ahead), reading * state / self.read)
        updated, back = self._work(piece, max(ready, read), read)
        self.files.give(self.lay("disk", back, writing * state / self.write))
        return updated

    def _take(self, piece: PieceSize, when: float) -> None:
        self.taken[piece.unit] = max(self.taken[piece.unit], when)

    def _work(self, piece: PieceSize, ready: float, ahead: float) -> tuple[float, float]:
        """When the parameters are updated, and when the state is back on the host."""
        return self._stream(piece, ready, ahead) if piece.lane == "gpu" else self._by_cores(piece, ready)

    def _stream(self, piece: PieceSize, ready: float, ahead: float) -> tuple[float, float]:
        n, away = piece.elements, self.away
        state = away.streamed(piece)
        up = self.lay("pcie_up", max(self.staging.take(), ahead), n * state / self.both)
        done = max(up, ready) + n * self.kernel
        self._take(piece, done)
        there = away.groups[piece.unit].home.params == "device"
        down = self.lay("pcie_down", done, n * (state + away.emitted(piece)) / self.both)
        self.staging.give(down)
        return (done if there else down), down

    def _by_cores(self, piece: PieceSize, ready: float) -> tuple[float, float]:
        n, away = piece.elements, self.away
        tray = self.trays.take()
        if away.late:
            here = max(ready, tray, self.drained.get(piece.unit, 0.0))
        else:
            here = self.lay("pcie_down", max(ready, tray), n * away.gradient / self.both)
        self._take(piece, here)
        up = done = self.lay("cpu", here, n * self.core)
        if away.groups[piece.unit].home.params == "device":
            up = self.lay("pcie_up", done, n * away.compute / self.both)
        self.trays.give(up)
        return up, done
