"""What rests away from the device, in bytes: pieces of the update and who does them, arenas, staging, files.

An away unit's shard, which is gathered from, is in the compute dtype; its master and moments lie in its home; its
gradient is one flat buffer in the dtype it was reduced in. (on_torch/offload/units.py) A shard in host memory may be half of the
master there, and then takes no memory of its own. (on_torch/offload/stores/packed.py)
"""

from collections import Counter
from dataclasses import dataclass

from fullshard.optimizer import SGD, Optimizer
from fullshard.plan import Place, Plan
from fullshard.planner.step.unit_sizes import UnitSizes, item
from fullshard.update_pieces import DISK_SLOTS, READ_SLOTS, TRAYS, WRITE_SLOTS, Lane, cut, deal, filed

SHARE = 0.5  # of the pieces that the CPU updates, where nobody knows the cluster


@dataclass(frozen=True)
class Piece:
    """A piece of a unit's update; `home` is where its state rests."""

    unit: str
    elements: int
    lane: Lane
    home: Place


def slots_of(optimizer: Optimizer) -> int:
    """Tensors of state for each parameter."""
    if isinstance(optimizer, SGD):
        return 1 if optimizer.momentum else 0
    return 2


def waits_for_norm(plan: Plan, clip: bool) -> bool:
    """Whether updates wait for all gradients: to clip them, or to see that none is infinite."""
    return clip or plan.precision.compute == "fp16"


def pieces(groups: dict[str, UnitSizes], cpu_share: float) -> list[Piece]:
    """All pieces of all away units in the order of forward; state that is on the device anyway is never the CPU's."""
    every = [(g, stop - start) for g in groups.values() if g.away for start, stop in cut(g.moving)]
    dealt = zip(every, deal(len(every), cpu_share), strict=True)
    return [Piece(g.name, n, "gpu" if g.home.optimizer == "device" else lane, g.home.optimizer) for (g, n), lane in dealt]


def staying(plan: Plan, groups: dict[str, UnitSizes], cut_up: list[Piece], clip: bool) -> set[str]:
    """Units whose gradient stays on the device until their update: all, but for those that the CPU alone updates, whose
    gradients wait for the norm in host memory."""
    by_cores = {p.unit for p in cut_up} - {p.unit for p in cut_up if p.lane == "gpu"}
    return set(groups) - (by_cores if waits_for_norm(plan, clip) else set())


class Waiting:
    """Units whose gradients wait on the device, as they come; not more than the plan's backlog, but for one that is larger
    than that. (on_torch/offload/updates/gradient_limit.py)"""

    def __init__(self, away: "Away"):
        self.limit, self.pieces = away.backlog, Counter(p.unit for p in away.pieces)
        self.units: list[str] = []

    def add(self, unit: str) -> list[str]:
        """The units that must be gone before backward goes on after this one, the oldest first."""
        self.units.append(unit)
        gone = 0
        while self.limit is not None and sum(self.pieces[u] for u in self.units[gone:]) > self.limit:
            if len(self.units) - gone == 1:
                break
            gone += 1
        waited, self.units = self.units[:gone], self.units[gone:]
        return waited

    def drop(self, unit: str) -> None:
        """Its update is known to be done."""
        if unit in self.units:
            self.units.remove(unit)


class Away:
    """The bytes of a plan's away units on one rank. `cpu_share`: where the plan leaves it open."""

    def __init__(self, plan: Plan, groups: dict[str, UnitSizes], slots: int, *, clip: bool = True, cpu_share: float = SHARE):
        self.plan, self.groups, self.slots, self.clip = plan, groups, slots, clip
        p = plan.precision
        self.compute, self.master, self.gradient = item(p.compute), item(p.master), item(plan.away_gradients)
        self.pieces = pieces(groups, cpu_share if plan.cpu_share is None else plan.cpu_share)
        self.late = waits_for_norm(plan, clip)
        self.staying = staying(plan, groups, self.pieces, clip)

    @property
    def backlog(self) -> int | None:
        """Pieces whose gradients may wait beside the unit at hand; where updates wait for the norm, all of them do."""
        return None if self.late else self.plan.backlog

    @property
    def by_need(self) -> bool:
        """Whether, of the pieces that have their gradients, those are updated first that the next forward needs first; else
        as they came. (on_torch/offload/tiered_optimizer.py)"""
        return not (self.late or self.plan.backlog or self._on_disk())

    def __bool__(self) -> bool:
        return any(g.away or g.home.activations != "device" for g in self.groups.values())

    @property
    def state(self) -> int:
        """Bytes of master and moments, an element."""
        return (1 + self.slots) * self.master

    def resting(self, group: UnitSizes) -> int:
        """Bytes of an away unit's master and moments; what is frozen has no moments."""
        return self.master * (sum(group.shards) + self.slots * group.moving)

    @property
    def largest(self) -> int:
        """Elements of the largest piece: what every slot of staging is made for."""
        return max((p.elements for p in self.pieces), default=0)

    def staging(self) -> list[int]:
        """Bytes of each device slot: those that state is streamed through; the bench that it is updated on, with the gradient
        in the master dtype, the master where pieces come packed, and the parameters where they do so without them, or go on
        to the host."""
        streamed = sum(p.lane == "gpu" for p in self.pieces)
        files = DISK_SLOTS if self._on_disk() else streamed  # a slot holds one of the file's
        slots = min(self.plan.staging, streamed, files)
        bench = [self._bench()] if slots else []
        slot = max((self.streamed(p) for p in self.pieces if p.lane == "gpu"), default=0)
        return [self.largest * nbytes for nbytes in [slot] * slots + bench]

    def streamed(self, piece: Piece) -> int:
        """Bytes of state, an element, that pass the device and come back; of a pair, parameters among them."""
        return self.state - self.plan.bytes_in_parameter(self.groups[piece.unit].home, self.slots)

    def emitted(self, piece: Piece) -> int:
        """Bytes of new parameters, an element, that leave the device beside the state."""
        home = self.groups[piece.unit].home
        return 0 if home.params == "device" or self.plan.pairs(home, self.slots) else self.compute

    def apart(self, group: UnitSizes) -> int:
        """Bytes of a shard away from the device, in memory of its own: all of it, but where it is half of the master, only
        what is frozen."""
        return self.compute * (sum(group.shards) - group.moving * self.plan.pairs(group.home, self.slots))

    def _bench(self) -> int:
        """Bytes of the memory that pieces are updated in, an element."""
        streamed = [p for p in self.pieces if p.lane == "gpu"]
        packed = any(self.plan.packs(self.groups[p.unit].home, self.slots) for p in streamed)
        rounded = any(self.streamed(p) < self.state or self.emitted(p) for p in streamed)
        return self.master * (1 + packed) + self.compute * rounded

    def _on_disk(self) -> bool:
        return any(p.home == "disk" for p in self.pieces)

    def host(self, activations: int = 0) -> dict[str, int]:
        """Pinned bytes by term. `activations`: those that are there at once."""
        terms = {
            "optimizer": self._states("host"),
            "params": sum(self.apart(g) for g in self.groups.values() if g.home.params == "host"),
            "gradients": self.gradient * sum(p.elements for p in self.pieces if p.lane == "cpu") if self.late else 0,
            "activations": activations,
            "staging": self._host_staging(),
        }
        return {term: nbytes for term, nbytes in terms.items() if nbytes}

    def disk(self, activations: int = 0) -> dict[str, int]:
        """Bytes of files by term. `activations`: those that are there at once."""
        terms = {"optimizer": self._states("disk"), "params": sum(self._filed()), "activations": activations}
        return {term: nbytes for term, nbytes in terms.items() if nbytes}

    def disk_traffic(self) -> tuple[int, int]:
        """Bytes of a step from disk and to it: state once each way, a shard once a gather and once an update."""
        state = sum(self.state * g.moving for g in self.groups.values() if g.home.optimizer == "disk")
        on_disk = [g for g in self.groups.values() if g.home.params == "disk"]
        read = sum(self._gathers(g) * nbytes for g, nbytes in zip(on_disk, self._filed(), strict=True))
        return state + read, state + sum(g.moving * self.compute for g in on_disk)

    def _gathers(self, group: UnitSizes) -> int:
        """Of a step: for forward, and for backward where nothing was kept."""
        return 1 if group.keeps else self.plan.batch.accumulate * (2 if group.reshard is True else 1)

    def _states(self, place: Place) -> int:
        return sum(self.resting(g) for g in self.groups.values() if g.home.optimizer == place)

    def _filed(self) -> list[int]:
        """Of each unit whose shard rests on disk, its bytes there."""
        on_disk = [g for g in self.groups.values() if g.home.params == "disk"]
        return [filed(sum(g.shards), g.moving, self.compute) for g in on_disk]

    def _host_staging(self) -> int:
        """Gradients down and parameters up, of the CPU's pieces; state and shards between disk and device."""
        by_cores = [p for p in self.pieces if p.lane == "cpu"]
        sends = any(self.groups[p.unit].home.params == "device" for p in by_cores)
        cores = min(TRAYS, len(by_cores)) * (self.gradient + self.compute * sends)
        files = DISK_SLOTS * self.state if self._on_disk() else 0
        shards = self._filed()
        new = WRITE_SLOTS * self.compute if shards else 0
        return (cores + files + new) * self.largest + READ_SLOTS * max(shards, default=0)
