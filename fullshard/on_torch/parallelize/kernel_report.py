"""The kernels of a step's loss, updates and messages, and the reason for the choice, for the run's log."""

import torch

from fullshard.on_torch.communication.message_kernel import find_messages
from fullshard.on_torch.loss.softmax_loss import find_softmax
from fullshard.on_torch.offload.tiered_optimizer import TieredOptimizer
from fullshard.on_torch.offload.units.offloaded_unit import Piece
from fullshard.on_torch.offload.updates.gpu_lane import find_kernel
from fullshard.on_torch.optimizers import cpu_adam
from fullshard.on_torch.optimizers.low_bit_adam import LowBitAdam
from fullshard.on_torch.optimizers.low_bit_kernel import find_low_bit
from fullshard.on_torch.optimizers.one_pass_adam import OnePassAdam, find_one_pass
from fullshard.plan.plan import Plan, Wire
from fullshard.planner.step.quantized_wire import FUSED_BLOCK

PLANNED = "torch (as planned)"
FALLBACK = "torch: "  # how the text begins if something faster is missing


def update_kernels(offload: TieredOptimizer) -> dict[str, str]:
    """By lane, `compiled (cpu_adam.c)`, `triton` or `torch`. After `torch` the reason: in brackets if nothing faster exists,
    after a colon if something faster is missing."""
    pieces = [p for a in offload.units for p in a.pieces]
    lanes = {name: [p for p in pieces if p.lane == name] for name in ("cpu", "gpu")}
    found = {"cpu_update": _cpu_kernel(offload, lanes["cpu"]), "gpu_update": _gpu_kernel(offload, lanes["gpu"])}
    return {lane: text for lane, text in found.items() if text}


def step_kernels(device: torch.device, optimizer: torch.optim.Optimizer | None, plan: Plan) -> dict[str, str]:
    """The kernels of attention, if the plan names one, and on a GPU of the chunked loss, of resident parameters' update and of
    quantised collectives; texts as above. A CPU has torch's alone."""
    found = {} if plan.kernels.attention == "auto" else {"attention": f"{plan.kernels.attention} (as planned)"}
    if device.type != "cuda":
        return found
    if plan.kernels.loss == "torch":
        found["chunked_loss"] = PLANNED
    else:
        softmax, why = find_softmax()
        found["chunked_loss"] = f"{FALLBACK}{why}" if softmax is None else "triton"
    if not plan.wire.is_plain:
        found["wire"] = _wire_kernel(plan.wire)
    if isinstance(optimizer, LowBitAdam):
        kernel, why = find_low_bit(optimizer.how, next(p.dtype for g in optimizer.param_groups for p in g["params"]))
        found["update"] = f"{FALLBACK}{why}" if kernel is None else "triton (low-bit state, in one pass)"
    elif isinstance(optimizer, OnePassAdam):
        found["update"] = "triton (with clipping, in one pass)"
    elif plan.kernels.update == "torch":
        found["update"] = PLANNED
    elif type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        kernel, why = find_one_pass(type(optimizer).__name__.lower())
        found["update"] = f"{FALLBACK}{why}" if kernel is None else "torch (Triton's kernel is for fp32 parameters on the device)"
    return found


def _wire_kernel(wire: Wire) -> str:
    if wire.block > FUSED_BLOCK:
        return f"torch (Triton's kernel is for blocks of at most {FUSED_BLOCK:,} elements)"
    tried = [find_messages(code, wire.block) for code in (wire.gather, wire.reduce) if code != "plain"]
    return next((f"{FALLBACK}{why}" for kernel, why in tried if kernel is None), "triton")


def _cpu_kernel(offload: TieredOptimizer, pieces: list[Piece]) -> str:
    if not pieces:
        return ""
    if offload.memory.low_bit is not None:
        return "torch (cpu_adam.c is not for low-bit state)"
    compute = offload.memory.compute if offload.memory.sizes.cpu_sends else None
    unfit = cpu_adam.unfit(offload.rule, [offload.master], offload.dtype, compute)
    if unfit:
        return f"torch (cpu_adam.c is not for {unfit})"
    found = cpu_adam.built()
    return f"{FALLBACK}{found.why}" if found.library is None else "compiled (cpu_adam.c)"


def _gpu_kernel(offload: TieredOptimizer, pieces: list[Piece]) -> str:
    if not pieces:
        return ""
    if offload.memory.low_bit is not None and offload.device.type == "cuda":
        kernel, why = find_low_bit(offload.memory.low_bit, offload.master)
        return f"{FALLBACK}{why}" if kernel is None else "triton (low-bit state)"
    if offload.device.type != "cuda" or not any(p.packed for p in pieces):
        return "torch (Triton's kernel is for packed state on a GPU)"
    found, why = find_kernel(offload.device, offload.rule)
    return f"{FALLBACK}{why}" if found is None else "triton"
