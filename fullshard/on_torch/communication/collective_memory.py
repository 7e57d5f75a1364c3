"""The memory that FSDP's collectives send from and receive in, as the plan's `wire.memory` says."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fullshard.base.errors import FullshardError
from fullshard.plan.plan import Plan

SETTERS = {"nccl": "set_allocate_memory_from_process_group_for_comm", "symmetric": "set_symm_mem_for_comm"}
SUMS = "set_force_sum_reduction_for_comms"


def refuse_memory(plan: Plan, device: torch.device) -> None:
    """Raise for memory that this torch, or the backend of these ranks, does not have."""
    kind = plan.wire.memory
    if kind == "torch":
        return
    if not all(hasattr(FSDPModule, name) for name in (SETTERS[kind], SUMS)):
        raise FullshardError(f"wire.memory = {kind!r}: this torch has none of it; install torch 2.12 or newer, or leave it out")
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    if (backend := backends.get(device.type)) != "nccl":
        raise FullshardError(
            f"wire.memory = {kind!r} needs collectives of NCCL, and these ranks have those of {backend}; leave it out"
        )


def use_memory(plan: Plan, units: dict[str, list[FSDPModule]]) -> None:
    """Let every sharded unit communicate in this memory. Reductions are then sums that FSDP divides: NCCL averages only by way
    of a copy."""
    kind = plan.wire.memory
    for unit in plan.units if kind != "torch" else ():
        module = units[unit.name][0]
        if unit.layout != "replicated":
            module.set_force_sum_reduction_for_comms(True)
            if kind == "nccl":
                module.set_allocate_memory_from_process_group_for_comm(True)
            else:
                module.set_symm_mem_for_comm()
