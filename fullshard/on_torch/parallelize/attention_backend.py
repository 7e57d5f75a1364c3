"""The plan's choice of kernels: refused where this machine or model lacks them, before any memory is allocated."""

from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullshard.base.errors import FullshardError
from fullshard.on_torch.loss.softmax_loss import find_softmax
from fullshard.on_torch.optimizers.one_pass_adam import find_one_pass
from fullshard.plan.optimizer import AdamW, Optimizer
from fullshard.plan.plan import Plan
from fullshard.planner.device_limits import refuse_on_cpu

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
ATTENTION = "_fullshard_attention"  # an attribute of a block: its backend. Dynamo reads no weak registry.
NO_KERNEL = "No available kernel"  # what torch says if the backend cannot compute an attention


def refuse_kernels(model: nn.Module, plan: Plan, device: torch.device, optimizer: Optimizer | None) -> None:
    """Raise unless every kernel that the plan names works here."""
    if device.type == "cpu":
        refuse_on_cpu(plan.kernels)
    _refuse_attention(model, plan, device)
    if plan.kernels.loss == "fused":
        _refuse_fused("loss", *find_softmax())
    if plan.kernels.update == "fused":
        kind = "adamw" if isinstance(optimizer, AdamW) else "adam"
        _refuse_fused("update", *find_one_pass(kind))


def _refuse_fused(part: str, found: Any, why: str) -> None:
    if found is None:
        raise FullshardError(f"kernels.{part} = 'fused' does not work here: {why}; leave it out")


def _refuse_attention(model: nn.Module, plan: Plan, device: torch.device) -> None:
    kind = plan.kernels.attention
    if kind == "auto":
        return
    choice = f"kernels.attention = {kind!r}"
    if device.type == "cuda" and plan.precision.compute == "fp32":
        raise FullshardError(f"{choice} needs precision.compute = 'bf16' or 'fp16'; write one of these, or leave it out")
    own = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    if own not in (None, "sdpa"):
        raise FullshardError(
            f"{choice} has no effect on this {type(model).__name__}, whose attention is {own!r}; build it with "
            "attn_implementation='sdpa', or leave the choice out"
        )
    if not any(any(model.get_submodule(path).children()) for unit in plan.units for path in unit.modules if path):
        raise FullshardError(f"{choice} has no effect: no unit of this plan is a block; leave it out")


def use_backend(module: nn.Module, kind: str) -> None:
    """Let the attention inside a block use this backend alone, in forward and where remat computes it again."""
    if kind != "auto" and any(module.children()):
        vars(module)[ATTENTION] = BACKENDS[kind]


def has_backend(module: nn.Module) -> bool:
    return ATTENTION in vars(module)


def call_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The block's own forward, with the backend of `use_backend` if it has one."""
    backend = getattr(block, ATTENTION, None)
    if backend is None:
        return type(block).forward(block, *args, **kwargs)
    with sdpa_kernel(backend):
        return type(block).forward(block, *args, **kwargs)
