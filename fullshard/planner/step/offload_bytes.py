"""Bytes of offloaded units: pieces of the update and their lanes, pinned memory, device staging, files.

Engine and planner both take their sizes from here. The shard of an offloaded unit, which is gathered from, is in the compute
dtype. Its master and moments lie in the home of its optimizer state. Its gradient is one flat buffer in the dtype of the
reduction. A shard in host memory may lie in half of the master's memory, and then takes none of its own (`Plan.pairs`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fullshard.model.description import Description
from fullshard.plan.optimizer import SGD, Optimizer
from fullshard.plan.plan import Home, HomeName, Plan
from fullshard.plan.update_pieces import (
    CPU_BUFFERS,
    DISK_SLOTS,
    GRAIN,
    READ_SLOTS,
    WRITE_SLOTS,
    Lane,
    cut,
    deal,
    shard_file_bytes,
)
from fullshard.planner.step.memo import remembered
from fullshard.planner.step.unit_sizes import UnitSizes, item, unit_sizes

SHARE = 0.5  # of the pieces that the CPU updates, if the cluster is unknown


@dataclass(frozen=True)
class UnitElements:
    """One offloaded unit of a rank, in elements."""

    name: str
    home: Home
    elements: int  # of its parameters
    moving: int  # of its trained parameters, which have moments
    padded: int  # of the memory that FSDP gathers from


@dataclass(frozen=True)
class PieceSize:
    """A piece of a unit's update; `home` is that of its state."""

    unit: str
    elements: int
    lane: Lane
    home: HomeName


@dataclass(frozen=True)
class StagingLayout:
    """Device memory of the GPU lane: slots that state is streamed through, and a workspace to update one piece in."""

    slots: int
    low_halves: bool  # of masters, only the low 16 bits pass the slots
    master: bool  # the workspace holds a master that was packed
    params: bool  # the workspace holds parameters: pieces come packed without them, or send them to the host


def slots_of(optimizer: Optimizer) -> int:
    """Tensors of state for each parameter."""
    if isinstance(optimizer, SGD):
        return 1 if optimizer.momentum else 0
    return 2


def waits_for_norm(plan: Plan, clip: bool) -> bool:
    """True if updates wait for all gradients: to clip them, or to see that none is infinite."""
    return clip or plan.precision.compute == "fp16"


def cut_units(units: Iterable[UnitElements], cpu_share: float) -> list[PieceSize]:
    """All pieces of all offloaded units, in forward order. The CPU never updates state on the device."""
    every = [(u, stop - start) for u in units for start, stop in cut(u.moving)]
    dealt = zip(every, deal(len(every), cpu_share), strict=True)
    return [PieceSize(u.name, n, "gpu" if u.home.optimizer == "device" else lane, u.home.optimizer) for (u, n), lane in dealt]


def pieces(groups: dict[str, UnitSizes], cpu_share: float) -> list[PieceSize]:
    """`cut_units` of the units of a plan."""
    return cut_units(offloaded(groups), cpu_share)


def offloaded(groups: dict[str, UnitSizes], grain: int = 1) -> list[UnitElements]:
    """The offloaded units of a plan. `grain`: parameters begin at multiples of it."""

    def grains(sizes: Iterable[int]) -> int:
        return sum(-(-n // grain) * grain for n in sizes)

    away = [g for g in groups.values() if g.away]
    if grain == 1:
        return [UnitElements(g.name, g.home, g.held, g.moving, g.held) for g in away]
    return [UnitElements(g.name, g.home, grains(g.shards), grains(g.shards[i] for i in g.trained), g.held) for g in away]


def pcie_traffic(plan: Plan, slots: int) -> tuple[float, int]:
    """Bytes an element over PCIe: of state, each way, if the GPU updates it; of gradient and new parameter if the CPU does."""
    p = plan.precision
    state = state_width(plan, slots)
    return state - max(plan.bytes_in_parameter(u.home, slots) for u in plan.units), item(plan.offloaded_gradients) + item(
        p.compute
    )


def state_width(plan: Plan, slots: int) -> float:
    """Bytes of master and moments, an element, with the share of a block's scale."""
    return item(plan.precision.master) + slots * plan.precision.moment_bytes(GRAIN) / GRAIN


def staying(plan: Plan, groups: dict[str, UnitSizes], cut_up: list[PieceSize], clip: bool) -> set[str]:
    """Units whose gradient stays on the device until their update: all, except those that the CPU alone updates. Their
    gradients wait for the norm in host memory."""
    by_cores = {p.unit for p in cut_up} - {p.unit for p in cut_up if p.lane == "gpu"}
    return set(groups) - (by_cores if waits_for_norm(plan, clip) else set())


class WaitingGradients:
    """Units whose gradients wait on the device for their update. They have at most as many pieces as the plan's backlog; a
    unit that is larger than that waits alone. (on_torch/offload/updates/gradient_limit.py)"""

    def __init__(self, sizes: "OffloadBytes"):
        self.limit, self.pieces = sizes.backlog, Counter(p.unit for p in sizes.pieces)
        self.units: list[str] = []

    def add(self, unit: str) -> list[str]:
        """Add a unit; return those whose updates must be done before backward goes on, the oldest first."""
        self.units.append(unit)
        gone = 0
        while self.limit is not None and sum(self.pieces[u] for u in self.units[gone:]) > self.limit:
            if len(self.units) - gone == 1:
                break
            gone += 1
        waited, self.units = self.units[:gone], self.units[gone:]
        return waited

    def drop(self, unit: str) -> None:
        """The unit's update is done."""
        if unit in self.units:
            self.units.remove(unit)


class OffloadSizes:
    """Sizes of the pinned memory and the device staging of one rank's offloaded units."""

    def __init__(self, plan: Plan, units: Sequence[UnitElements], slots: int, cpu_share: float):
        self.plan, self.offloaded, self.slots = plan, {u.name: u for u in units}, slots
        p = plan.precision
        self.compute, self.master, self.gradient = item(p.compute), item(p.master), item(plan.offloaded_gradients)
        self.pieces = cut_units(units, cpu_share)

    @cached_property
    def state(self) -> float:
        """Bytes of master and moments, an element."""
        return state_width(self.plan, self.slots)

    def state_parts(self, elements: int, moving: int) -> list[int]:
        """Bytes of a master and of each moment. Frozen parameters, which are not `moving`, have no moments."""
        return [elements * self.master, *[self.plan.precision.moment_bytes(moving)] * self.slots]

    @cached_property
    def largest(self) -> int:
        """Elements of the largest piece, the size of every staging buffer."""
        return max((p.elements for p in self.pieces), default=0)

    @property
    def in_turn(self) -> bool:
        """True if pieces are updated in the order of backward, as they come from a file or make room for the next. Else
        the pieces that the next forward needs first are updated first."""
        return self.plan.backlog is not None or self.state_on_disk

    @cached_property
    def state_on_disk(self) -> bool:
        return any(u.home.optimizer == "disk" for u in self.offloaded.values())

    def home(self, piece: PieceSize) -> Home:
        return self.offloaded[piece.unit].home

    def packed(self, piece: PieceSize) -> bool:
        """True if only the low 16 bits of the piece's masters are stored. Where the parameters are on the device, the CPU
        updates its pieces wide."""
        home = self.home(piece)
        return self.plan.packs(home, self.slots) and (piece.lane == "gpu" or home.params == "host")

    def paired(self, piece: PieceSize) -> bool:
        """True if the piece's parameters lie in the half of the masters' memory that packing frees."""
        return self.plan.pairs(self.home(piece), self.slots)

    # -- device --------------------------------------------------------------------------------------------

    def staging_layout(self) -> StagingLayout:
        streamed = [p for p in self.pieces if p.lane == "gpu"]
        slots = min(self.plan.staging, len(streamed))
        return StagingLayout(
            min(slots, DISK_SLOTS) if self.state_on_disk else slots,  # a device slot holds one buffer of the file
            all(self.streamed(p) < self.state for p in streamed) and bool(streamed),
            any(self.packed(p) for p in streamed),
            any(self.streamed(p) < self.state or self.emitted(p) for p in streamed),
        )

    def staging(self) -> list[int]:
        """Bytes of each slot, then of the workspace: the gradient in the master dtype, and what `StagingLayout` names."""
        found = self.staging_layout()
        streamed = [p for p in self.pieces if p.lane == "gpu"]
        told = min((self.plan.bytes_in_parameter(self.home(p), self.slots) for p in streamed), default=0)
        slot = sum(self.state_parts(self.largest, self.largest)) - told * self.largest
        workspace = self.largest * (self.master * (1 + found.master) + self.compute * found.params)
        return [slot] * found.slots + [workspace] * bool(found.slots)

    def streamed(self, piece: PieceSize) -> float:
        """Bytes of state, an element, that go to the device and come back; of a pair, parameters among them."""
        return self.state - self.plan.bytes_in_parameter(self.home(piece), self.slots)

    def emitted(self, piece: PieceSize) -> int:
        """Bytes of new parameters, an element, that leave the device beside the state."""
        home = self.home(piece)
        return 0 if home.params == "device" or self.plan.pairs(home, self.slots) else self.compute

    # -- host ----------------------------------------------------------------------------------------------

    def arena(self) -> dict[str, list[int]]:
        """Bytes of each tensor in pinned memory, by term; without gradients that wait for the norm."""
        every = self.offloaded.values()
        return {
            "optimizer": [n for u in every if u.home.optimizer == "host" for n in self.state_bytes(u)],
            "params": [self.shard_bytes(u) for u in every if u.home.params == "host"],
            "staging": [*self._gradient_buffers(), *self._state_buffers(), *self._shard_buffers()],
        }

    def state_bytes(self, unit: UnitElements) -> list[int]:
        """Of master and each moment. Frozen parameters have no moments."""
        return self.state_parts(unit.elements, unit.moving)

    def shard_elements(self, unit: UnitElements) -> int:
        """Elements of a shard in memory of its own. Of a pair, that is what is frozen: the rest lies with the masters."""
        return unit.elements - unit.moving if self.plan.pairs(unit.home, self.slots) else unit.padded

    def shard_bytes(self, unit: UnitElements) -> int:
        return self.compute * self.shard_elements(unit)

    def waiting_gradients(self) -> list[int]:
        """Bytes of each of the CPU's gradients, where they wait for the norm in host memory."""
        return [p.elements * self.gradient for p in self.pieces if p.lane == "cpu"]

    def file_bytes(self) -> list[int]:
        """Bytes in the file of each unit whose parameters are on disk."""
        on_disk = [u for u in self.offloaded.values() if u.home.params == "disk"]
        return [shard_file_bytes(u.elements, u.moving, self.compute) for u in on_disk]

    @property
    def cpu_buffers(self) -> int:
        """Pinned buffers of the CPU lane."""
        return min(CPU_BUFFERS, sum(p.lane == "cpu" for p in self.pieces))

    @property
    def cpu_sends(self) -> bool:
        """True if the CPU lane sends new parameters to the device."""
        return any(p.lane == "cpu" and self.home(p).params == "device" for p in self.pieces)

    def _gradient_buffers(self) -> list[int]:
        """Of the CPU lane: gradients, and parameters to be sent."""
        each = [self.gradient, self.compute] if self.cpu_sends else [self.gradient]
        return [self.largest * nbytes for nbytes in each for _ in range(self.cpu_buffers)]

    def _state_buffers(self) -> list[int]:
        """Between disk and device: master and moments of a piece."""
        return self.state_parts(self.largest, self.largest) * DISK_SLOTS if self.state_on_disk else []

    def _shard_buffers(self) -> list[int]:
        """Between disk and device: a unit's shard, and a piece's new parameters."""
        shards = self.file_bytes()
        return [max(shards)] * READ_SLOTS + [self.largest * self.compute] * WRITE_SLOTS if shards else []


def offload_bytes(
    plan: Plan, description: Description, slots: int, *, clip: bool = True, cpu_share: float = SHARE
) -> "OffloadBytes":
    """The bytes of a plan's offloaded units, which memory and time of the same plan share."""
    make = lambda: OffloadBytes(plan, unit_sizes(plan, description), slots, clip=clip, cpu_share=cpu_share)
    return remembered(description, "offload", plan, (slots, clip, cpu_share), make)


class OffloadBytes(OffloadSizes):
    """What the offloaded units of a plan take and move, for the planner. `cpu_share`: if the plan does not say."""

    def __init__(self, plan: Plan, groups: dict[str, UnitSizes], slots: int, *, clip: bool = True, cpu_share: float = SHARE):
        units = offloaded(groups, plan.precision.moment_grain)
        super().__init__(plan, units, slots, cpu_share if plan.cpu_share is None else plan.cpu_share)
        self.groups, self.clip = groups, clip
        self.late = waits_for_norm(plan, clip)
        self.staying = staying(plan, groups, self.pieces, clip)

    def __bool__(self) -> bool:
        return any(g.away or g.home.activations != "device" for g in self.groups.values())

    @property
    def backlog(self) -> int | None:
        """Pieces whose gradients may wait beside the unit at hand. If updates wait for the norm, all of them wait."""
        return None if self.late else self.plan.backlog

    @property
    def by_need(self) -> bool:
        """True if, of the pieces that have their gradients, those are updated first that the next forward needs first."""
        return not (self.late or self.in_turn)

    def state_of(self, group: UnitSizes) -> int:
        """Bytes of an offloaded unit's master and moments."""
        return sum(self.state_bytes(self.offloaded[group.name]))

    def shard_of(self, group: UnitSizes) -> int:
        """Bytes of an offloaded unit's shard, in memory of its own."""
        return self.shard_bytes(self.offloaded[group.name])

    def host(self, activations: int = 0) -> dict[str, int]:
        """Pinned bytes by term. `activations`: those that are there at once."""
        arena = {term: sum(sizes) for term, sizes in self.arena().items()}
        terms = {
            "optimizer": arena["optimizer"],
            "params": arena["params"],
            "gradients": sum(self.waiting_gradients()) if self.late else 0,
            "activations": activations,
            "staging": arena["staging"],
        }
        return {term: nbytes for term, nbytes in terms.items() if nbytes}

    def disk(self, activations: int = 0) -> dict[str, int]:
        """Bytes of files by term. `activations`: those that are there at once."""
        state = sum(sum(self.state_bytes(u)) for u in self.offloaded.values() if u.home.optimizer == "disk")
        terms = {"optimizer": state, "params": sum(self.file_bytes()), "activations": activations}
        return {term: nbytes for term, nbytes in terms.items() if nbytes}

    def disk_traffic(self) -> tuple[int, int]:
        """Bytes that a step reads from disk and writes to it: state once each way, a shard once a gather and once an update."""
        on_disk_state = [u.moving for u in self.offloaded.values() if u.home.optimizer == "disk"]
        state = sum(sum(self.state_parts(n, n)) for n in on_disk_state)
        on_disk = [g for g in self.groups.values() if g.home.params == "disk"]
        read = sum(self._gathers(g) * nbytes for g, nbytes in zip(on_disk, self.file_bytes(), strict=True))
        return state + read, state + sum(g.moving * self.compute for g in on_disk)

    def _gathers(self, group: UnitSizes) -> int:
        """Of a step: for forward, and for backward unless the unit stays gathered."""
        return 1 if group.keeps else self.plan.batch.accumulate * (2 if group.reshard is True else 1)
