"""The two stores of an offloaded unit, by its homes. No other module of the engine decides by them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fullshard.on_torch.offload.stores.device_store import DeviceParameters, MemoryState
from fullshard.on_torch.offload.stores.disk_params import ParameterFile
from fullshard.on_torch.offload.stores.disk_state import DiskState, StateFile
from fullshard.on_torch.offload.stores.host_store import HostParameters
from fullshard.on_torch.offload.stores.packed_state import PackedState, Packing, PairedParameters
from fullshard.on_torch.offload.stores.state_layout import StateLayout
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit
from fullshard.on_torch.offload.units.store_protocols import ParameterStore, StateStore
from fullshard.plan.plan import Plan
from fullshard.planner.step.offload_bytes import UnitElements
from fullshard.storage.pinned_arena import Arena


@dataclass(frozen=True)
class StoreParts:
    """What stores are made of: memory, files and dtypes of one rank."""

    plan: Plan
    layout: StateLayout
    device: torch.device
    compute: torch.dtype
    arena: Arena
    packing: Packing
    state_file: StateFile | None
    params_file: ParameterFile | None

    def pinned(self, elements: int, dtype: torch.dtype) -> Tensor:
        return self.arena.take(elements * dtype.itemsize).view(dtype)


def open_files(
    units: list[OffloadedUnit], layout: StateLayout, compute: torch.dtype, disk: Path | None, arena: Arena, largest: int
) -> tuple[StateFile | None, ParameterFile | None]:
    """Files for the units whose state or parameters are on disk, if there are any."""
    state = [u for u in units if u.home.optimizer == "disk"]
    params = [u for u in units if u.home.params == "disk"]
    if disk is None:
        assert not state
        assert not params
        return None, None
    return (
        StateFile(state, layout, disk, arena, largest) if state else None,
        ParameterFile(params, compute, disk, arena, largest) if params else None,
    )


def choose_stores(unit: OffloadedUnit, parts: StoreParts, shard_elements: int) -> None:
    """Give a unit its stores. `shard_elements`: of host memory for its parameters alone."""
    unit.state = _state_store(unit, parts)
    unit.shards = _parameter_store(unit, parts, shard_elements)


def _state_store(unit: OffloadedUnit, parts: StoreParts) -> StateStore:
    layout = parts.layout
    if unit.home.optimizer == "disk":
        assert parts.state_file is not None
        return DiskState(unit, parts.state_file)
    flats = list(zip(layout.lengths(unit.elements, unit.moving), layout.dtypes, strict=True))
    if unit.home.optimizer == "device":
        return MemoryState(unit, [torch.zeros(n, dtype=d, device=parts.device) for n, d in flats], layout)
    pinned = [parts.pinned(n, dtype) for n, dtype in flats]
    if parts.plan.packs(unit.home, layout.slots):
        return PackedState(unit, pinned, layout, parts.packing)
    return MemoryState(unit, pinned, layout)


def _parameter_store(unit: OffloadedUnit, parts: StoreParts, shard_elements: int) -> ParameterStore:
    if unit.home.params == "device":
        return DeviceParameters(unit)
    if unit.home.params == "disk":
        assert parts.params_file is not None
        return parts.params_file.stores[unit.name]
    memory = parts.pinned(shard_elements, parts.compute)
    if parts.plan.pairs(unit.home, parts.layout.slots):
        assert isinstance(unit.state, PackedState)
        return PairedParameters(unit, unit.state, memory)
    return HostParameters(unit, memory)


def elements_of(unit: OffloadedUnit) -> UnitElements:
    """The unit's sizes on this rank, for `OffloadSizes`."""
    return UnitElements(unit.name, unit.home, unit.elements, unit.moving, sum(unit.padded))
