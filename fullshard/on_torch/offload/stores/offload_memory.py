"""The memory and files of all offloaded units of one rank: one arena of pinned host memory, and a file for each kind.

Takes them once at the start, gives each unit its stores, and hands whole units to checkpoints. Knows nothing of updates.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.on_torch.offload.stores.choose_stores import StoreParts, choose_stores, elements_of, open_files
from fullshard.on_torch.offload.stores.packed_state import Packing
from fullshard.on_torch.offload.stores.shard_fetcher import ShardFetcher, free_shards
from fullshard.on_torch.offload.stores.state_layout import StateLayout
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit, offloaded_units
from fullshard.on_torch.offload.units.store_protocols import Readable
from fullshard.on_torch.optimizers.adam_update import Rule, rule_of
from fullshard.on_torch.optimizers.low_bit_update import LowBitRule
from fullshard.on_torch.private.fsdp_groups import gather_group
from fullshard.on_torch.private.torch_internals import hide_values
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES
from fullshard.on_torch.tensors.shard_ranges import local, shadow
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan
from fullshard.planner.step.offload_bytes import OffloadSizes, pcie_traffic
from fullshard.ranks.local_ranks import ranks_here
from fullshard.storage.pinned_arena import Arena, refuse_more_than, room

WHY = "the optimizer's state and parameters in host memory"


class OffloadMemory:
    """The memory and files of all offloaded units of one rank."""

    def __init__(
        self,
        units: list[OffloadedUnit],
        plan: Plan,
        device: torch.device,
        rule: Rule,
        *,
        cpu_share: float,
        disk: Path | None,
        ranks_here: int,
    ):
        self.units, self.device, self.rule = units, device, rule
        self.master, self.compute = PLAN_DTYPES[plan.precision.master], PLAN_DTYPES[plan.precision.compute]
        self.sizes = OffloadSizes(plan, [elements_of(u) for u in units], rule.slots, cpu_share)
        for piece, size in zip((p for u in units for p in u.pieces), self.sizes.pieces, strict=True):
            piece.lane, piece.packed, piece.paired = size.lane, self.sizes.packed(size), self.sizes.paired(size)
        nbytes = room(n for term in self.sizes.arena().values() for n in term)
        refuse_more_than(nbytes, ranks_here, WHY)
        self.arena = Arena(nbytes, device.type == "cuda", WHY)
        self.packing = Packing(device)
        self.layout, self.low_bit = StateLayout.of(plan.precision, rule.slots), LowBitRule.of(plan.precision, rule)
        files = open_files(units, self.layout, self.compute, disk, self.arena, self.sizes.largest)
        self.state_file, self.params_file = files
        parts = StoreParts(plan, self.layout, device, self.compute, self.arena, self.packing, *files)
        for unit, elements in zip(units, self.sizes.offloaded.values(), strict=True):
            choose_stores(unit, parts, self.sizes.shard_elements(elements))
        self.fetcher = ShardFetcher(device, self.packing)

    # -- a step ------------------------------------------------------------------------------------------------

    def watch(self, check_lanes: Callable[[], None]) -> None:
        """`check_lanes` raises if a lane has failed. Whoever waits for one calls it now and then."""
        if self.params_file is not None:
            self.params_file.check_lanes = check_lanes

    def begin(self) -> None:
        """A step begins."""
        self.packing.pack()
        if self.params_file is not None:
            self.params_file.begin()

    def end(self) -> None:
        """A step has gathered for the last time."""
        if self.params_file is not None:
            self.params_file.rewind()

    def settle(self) -> None:
        """Wait until every change is in its place."""
        for unit in self.units:
            unit.state.settle()
        if self.params_file is not None:
            self.params_file.settle()

    def moved(self) -> dict[str, int]:
        """Bytes read from files and written to them, since the start."""
        files = [f for f in (self.state_file, self.params_file) if f]
        return {"read": sum(f.read_bytes for f in files), "written": sum(f.written_bytes for f in files)}

    # -- whole units -------------------------------------------------------------------------------------------

    def initial_values(self) -> dict[int, Tensor]:
        """By id of each parameter of an offloaded unit, the memory for its initial value."""
        found: dict[int, Tensor] = {}
        for unit in self.units:
            flat = unit.state.initial()
            found |= {id(p): unit.view(flat, i) for i, p in enumerate(unit.params)}
        return found

    def install(self, model: nn.Module) -> None:
        """Give the model shards in the compute dtype, and keep its initial values as the master."""
        for unit in self.units:
            flat = unit.state.whole()[0]
            for i, name in enumerate(unit.names):
                p = model.get_parameter(name)
                master = unit.view(flat, i)
                if local(p).data_ptr() != master.data_ptr():  # a model that came with values
                    master.copy_(local(p))
                new = nn.Parameter(shadow(p, local(p).to(self.device, self.compute, copy=True)), requires_grad=p.requires_grad)
                new.grad_dtype = None  # gradients come in the reduce dtype
                _replace(model, p, new)
                unit.params[i] = new
            unit.group.adopt()
            if not unit.shards.on_device:
                unit.shards.publish(flat)
                free_shards(unit)
                _hide_shards(unit)
            unit.state.give_back(changed=True)

    def publish(self, unit: OffloadedUnit) -> None:
        """New shards from the master, after it was written to."""
        unit.shards.publish(unit.state.whole()[0])

    def tensors(self, unit: OffloadedUnit, *, at_rest: bool = False) -> list[dict[str, Tensor]]:
        """For each parameter its master and moments, as tensors cut like it, until `give_back`. `at_rest`: those on disk
        are not read, and are shown on meta."""
        self.packing.looked_at = True
        flats = unit.state.shapes() if at_rest else unit.state.whole()
        found = []
        for i, p in enumerate(unit.params):
            views = {"master": shadow(p, unit.view(flats[0], i))}
            if i < unit.trained:
                views |= {k: shadow(p, unit.view(f, i)) for k, f in zip(self.rule.keys, flats[1:], strict=True)}
            found.append(views)
        return found

    def give_back(self, *, changed: bool) -> None:
        """The tensors of `tensors` are used no more. `changed`: they have new values."""
        self.packing.looked_at = False
        for unit in self.units:
            unit.state.give_back(changed=changed)

    def stored(self) -> dict[tuple[str, str], Readable]:
        """What is on disk, by the parameter's name and `master` or the moment's key."""
        found: dict[tuple[str, str], Readable] = {}
        for unit in self.units:
            for i, name in enumerate(unit.names):
                for which, key in enumerate(["master", *(self.rule.keys if i < unit.trained else ())]):
                    if (there := unit.state.stored(which, i)) is not None:
                        found[name, key] = there
        return found

    def close(self) -> None:
        for file in (self.state_file, self.params_file):
            if file is not None:
                file.close_file()
        self.arena.close()


def make_memory(
    model: nn.Module,
    plan: Plan,
    modules: dict[str, list[FSDPModule]],
    device: torch.device,
    optimizer: Optimizer | None,
    disk: str | Path | None,
    cpu_share: float | None,
    measured_share: Callable[..., float],
) -> OffloadMemory | None:
    """Memory for the plan's offloaded units, if it has any. Call after FSDP, while parameters are still on meta. `measured_share`
    of the CPU's updates, where neither the plan nor `cpu_share` says it."""
    groups = {n: g for n, found in modules.items() for m in found[:1] if (g := gather_group(m)) is not None}
    units = offloaded_units(model, plan, groups)
    if not units:
        return None
    assert optimizer is not None
    rule = rule_of(optimizer)
    share = plan.cpu_share if cpu_share is None else cpu_share
    if share is None:
        share = measured_share(device, rule, plan.precision, *pcie_traffic(plan, rule.slots))
    path = Path(disk) if disk is not None else None
    return OffloadMemory(units, plan, device, rule, cpu_share=share, disk=path, ranks_here=ranks_here())


def _hide_shards(unit: OffloadedUnit) -> None:
    """Let the model's parameters say how to read them, instead of a segmentation fault."""
    where = "in host memory" if unit.home.params == "host" else "on disk"
    for name, p in zip(unit.names, unit.params, strict=True):
        use = f"read it inside `with state.values() as values:`, as values[{name!r}]"
        hide_values(p, f"the model has no values of {name} between gathers, as its home is {where}; {use}")


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Everywhere: tied parameters stay tied."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is old:
                module._parameters[name] = new
