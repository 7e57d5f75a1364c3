"""The memory of a plan's offloaded units, from the plan. Measures the CPU's share of updates where the plan leaves it open."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fullshard.on_torch.offload.stores.offload_memory import OffloadMemory
from fullshard.on_torch.offload.units.offloaded_unit import offloaded_units
from fullshard.on_torch.offload.updates.cpu_share import measured_share
from fullshard.on_torch.optimizers.adam_update import rule_of
from fullshard.on_torch.private.fsdp_groups import gather_group
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan
from fullshard.planner.step.offload_bytes import pcie_traffic
from fullshard.ranks.local_ranks import ranks_here


def make_memory(
    model: nn.Module,
    plan: Plan,
    modules: dict[str, list[FSDPModule]],
    device: torch.device,
    optimizer: Optimizer | None,
    disk: str | Path | None,
    cpu_share: float | None,
) -> OffloadMemory | None:
    """Memory for the plan's offloaded units, if it has any. Call after FSDP, while parameters are still on meta."""
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
