"""Lanes of offload: PCIe each way, the host's cores and the disk. Updates of offloaded state are placed on them by pieces.

A piece is either streamed (state up, updated by the device, state down) or updated by the host's cores (gradient down,
parameter up). While both happen, each is slower than alone. Pieces pass through a few staging slots, so the slowest lane
sets the pace. The disk is one lane; reads and writes that overlap take the rate of both at once.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Literal

from fullshard.cluster.topology import Cluster
from fullshard.plan.plan import Plan
from fullshard.plan.update_pieces import CPU_BUFFERS, DISK_SLOTS, READ_SLOTS, balanced, low_bit_seconds
from fullshard.planner.step.offload_bytes import OffloadBytes, PieceSize, pcie_traffic, state_width
from fullshard.planner.step.saved_activations import UNITS_IN_TRANSIT

TransferLane = Literal["pcie_up", "pcie_down", "cpu", "disk"]
ADAMW = 28  # bytes an element of AdamW's update in fp32: gradient, master and moments in and out
TRANSFER_LANES: tuple[TransferLane, ...] = ("pcie_up", "pcie_down", "cpu", "disk")


def balance(cluster: Cluster, plan: Plan, slots: int) -> float:
    """The share of pieces that the cores update so that they and PCIe finish at about the same time."""
    if cluster.device.kind == "cpu":
        return 0.5  # the same cores do both
    both, cores = rates(cluster, plan, slots, at_once=True)
    streamed, sent = pcie_traffic(plan, slots)
    return balanced(2 * streamed / both, cores, sent / both)


def rates(cluster: Cluster, plan: Plan, slots: int, *, at_once: bool) -> tuple[float, float]:
    """Bytes a second over PCIe, both ways together, and seconds of an update by the cores for each parameter.

    The update's seconds are AdamW's, scaled by the bytes that it moves; of low-bit state, at least those that its arithmetic
    takes. `at_once`: while both use the host's memory.
    """
    both, p = cluster.of("pcie_beside" if at_once else "pcie_both"), plan.precision
    state = state_width(plan, slots) if p.low_bit else 4 * (1 + slots)
    moved = cluster.of("adamw_beside" if at_once else "adamw") * (4 + 2 * state) / ADAMW
    if not p.low_bit:
        return both, moved
    cores, stochastic = cluster.node.host.cores, p.rounding == "stochastic"
    return both, max(moved, low_bit_seconds(p.moment_kind, cores, stochastic=stochastic))


class Calendar:
    """When a lane is busy. Work takes the free time from when it is ready, around what was placed before."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def take(self, ready: float, seconds: float) -> float:
        """Place work that may start at `ready`; return when it is done."""
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
        """Make the lane busy from `begin` to `done`, in place of the entries between, joined with neighbours that touch."""
        if first > 0 and self.ends[first - 1] >= begin:
            first -= 1
            begin = self.starts[first]
        if after < len(self.starts) and self.starts[after] <= done:
            done = self.ends[after]
            after += 1
        self.starts[first:after], self.ends[first:after] = [begin], [done]


@dataclass
class SlotPool:
    """Slots that pieces take in turn. `free`: when each is free again; None for no limit."""

    free: deque[float] | None

    @classmethod
    def of(cls, count: int | None) -> "SlotPool":
        return cls(None if count is None else deque([0.0] * count))

    def take(self) -> float:
        """The time at which the next slot is free."""
        return 0.0 if self.free is None else self.free.popleft()

    def give(self, when: float) -> None:
        """Return the slot that was taken first, free from `when` on."""
        if self.free is not None:
            self.free.append(when)


class Transfers:
    """Transfers between device, host and disk, and the updates of offloaded units."""

    def __init__(self, cluster: Cluster, away: OffloadBytes):
        self.away = away
        self.gpu = cluster.device.kind != "cpu"
        self.lanes = {lane: Calendar() for lane in TRANSFER_LANES}
        self.busy: dict[str, float] = {}  # seconds of each lane
        lanes = {p.lane for p in away.pieces if p.home != "device"}
        both, self.core = rates(cluster, away.plan, away.slots, at_once=len(lanes) > 1)
        # A CPU is its own device: what would cross PCIe is copied.
        copy = cluster.of("dram") / 2
        self.up, self.down = (cluster.of("pcie_up"), cluster.of("pcie_down")) if self.gpu else (copy, copy)
        self.both = both / 2 if self.gpu else copy  # each way, while both are in use
        self.read, self.write = cluster.of("disk_read"), cluster.of("disk_write")
        # Factor on the seconds of a read or a write while the other goes on, from the rate of both at once.
        self.disk_overlap = 2 / cluster.of("disk_both") / (1 / self.read + 1 / self.write)
        self.disk_pieces_done, self.disk_pieces = 0, sum(p.home == "disk" for p in away.pieces)  # in this step so far, and in all
        self.kernel = (2 * away.state + away.gradient + away.compute) / cluster.of("hbm")
        self.staging = SlotPool.of(None if away.by_need else away.plan.staging)
        self.disk_slots, self.gradient_slots = SlotPool.of(DISK_SLOTS), SlotPool.of(None if away.by_need else CPU_BUFFERS)
        self.shard_slots = SlotPool.of(READ_SLOTS)
        self.activation_slots = SlotPool.of(UNITS_IN_TRANSIT)  # activations on their way to disk, by unit
        self.began = 0.0  # state may be fetched ahead from here: the first backward if updates wait for the norm, else the last
        self.drained: dict[str, float] = {}  # time at which a unit's gradients are on the host
        self.taken: dict[str, float] = {}  # time at which a unit's gradient on the device is no longer needed
        self.of_unit: dict[str, list[PieceSize]] = {}
        for piece in away.pieces:
            self.of_unit.setdefault(piece.unit, []).append(piece)

    def place(self, lane: TransferLane, ready: float, seconds: float) -> float:
        """Place work on a lane; return when it is done."""
        if seconds > 0:
            self.busy[lane] = self.busy.get(lane, 0.0) + seconds
        return self.lanes[lane].take(ready, seconds)

    def fetch(self, nbytes: int, ready: float) -> float:
        """Copy bytes to the device; return when they are there."""
        return self.place("pcie_up", ready, nbytes / self.up)

    def fetch_from_disk(self, nbytes: int, ready: float, written: float) -> float:
        """The same for a shard on disk, which is read ahead as soon as it is `written` and a slot is free."""
        read = self.place("disk", max(self.shard_slots.take(), written), nbytes / self.read)
        up = self.fetch(nbytes, max(ready, read))
        self.shard_slots.give(up)
        return up

    def spill(self, nbytes: int, ready: float) -> float:
        """Copy bytes to the host; return when they are there."""
        return self.place("pcie_down", ready, nbytes / self.down)

    def spill_to_disk(self, nbytes: int, ready: float) -> tuple[float, float]:
        """Copy activations to the host and on to disk; return when they are on the host, and when on disk."""
        down = self.spill(nbytes, max(ready, self.activation_slots.take()))
        written = self.place("disk", down, nbytes / self.write)
        self.activation_slots.give(written)
        return down, written

    def read_back(self, nbytes: int, ready: float) -> float:
        """Read activations from disk; return when they are on the host."""
        return self.place("disk", ready, nbytes / self.read)

    def drain(self, unit: str, ready: float) -> float:
        """Copy the gradients that the cores update with to the host; return when they are there."""
        elements = sum(p.elements for p in self.of_unit.get(unit, []) if p.lane == "cpu")
        self.drained[unit] = self.spill(elements * self.away.gradient, ready)
        return self.drained[unit]

    def update(self, unit: str, ready: float) -> float:
        """Update a unit whose gradient is ready at `ready`; return when its parameters are updated and in their home."""
        self.taken[unit] = ready
        return max((self._in_home(p, self._piece(p, ready)) for p in self.of_unit.get(unit, [])), default=ready)

    def _in_home(self, piece: PieceSize, updated: float) -> float:
        """The time at which a piece's new parameters are in their home."""
        if self.away.groups[piece.unit].home.params != "disk":
            return updated
        return self.place("disk", updated, piece.elements * self.away.compute / self.write)

    def _piece(self, piece: PieceSize, ready: float) -> float:
        ahead = self.began if self.away.late else ready  # when its state may be fetched
        if piece.home == "host":
            return self._work(piece, ready, ahead)[0]
        state = piece.elements * self.away.state
        self.disk_pieces_done += 1  # the first are read before any is written, the last are written when all have been read
        reading = self.disk_overlap if self.disk_pieces_done > DISK_SLOTS else 1.0
        writing = self.disk_overlap if self.disk_pieces_done <= self.disk_pieces - DISK_SLOTS else 1.0
        read = self.place("disk", max(self.disk_slots.take(), ahead), reading * state / self.read)
        updated, back = self._work(piece, max(ready, read), read)
        self.disk_slots.give(self.place("disk", back, writing * state / self.write))
        return updated

    def _take(self, piece: PieceSize, when: float) -> None:
        self.taken[piece.unit] = max(self.taken[piece.unit], when)

    def _work(self, piece: PieceSize, ready: float, ahead: float) -> tuple[float, float]:
        """The times at which the parameters are updated, and the state is back on the host."""
        return self._stream(piece, ready, ahead) if piece.lane == "gpu" else self._by_cores(piece, ready)

    def _stream(self, piece: PieceSize, ready: float, ahead: float) -> tuple[float, float]:
        n, away = piece.elements, self.away
        state = away.streamed(piece)
        up = self.place("pcie_up", max(self.staging.take(), ahead), n * state / self.both)
        done = max(up, ready) + n * self.kernel
        self._take(piece, done)
        there = away.groups[piece.unit].home.params == "device"
        down = self.place("pcie_down", done, n * (state + away.emitted(piece)) / self.both)
        self.staging.give(down)
        return (done if there else down), down

    def _by_cores(self, piece: PieceSize, ready: float) -> tuple[float, float]:
        n, away = piece.elements, self.away
        slot_free = self.gradient_slots.take()
        if away.late:
            here = max(ready, slot_free, self.drained.get(piece.unit, 0.0))
        else:
            here = self.place("pcie_down", max(ready, slot_free), n * away.gradient / self.both)
        self._take(piece, here)
        up = done = self.place("cpu", here, n * self.core)
        if away.groups[piece.unit].home.params == "device":
            up = self.place("pcie_up", done, n * away.compute / self.both)
        self.gradient_slots.give(up)
        return up, done
