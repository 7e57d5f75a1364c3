"""Norms and clipping over shards, beside torch's own on the unsharded model. For `test_gradient_norms`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard as fs
from fullshard import on_torch

Plans = dict[str, dict[str, Any]]
PLANS: Plans = {
    "zero3": {},
    "ddp": {},
    "mixed": {"replicate_below": 2000},
    "tensor": {"tensor": 2},
}


def gradients_of(model: nn.Module, precision: torch.dtype) -> dict[str, Tensor]:
    """Some, the same on every rank; a parameter has none."""
    draw = torch.Generator().manual_seed(4)
    made = {n: torch.randn(p.shape, generator=draw).to(precision) for n, p in model.named_parameters()}
    del made[next(iter(made))]
    return made


def beside_torch(kinds: list[float]) -> dict[str, list[tuple[float, float]]]:
    """By plan and norm type, how far norm and clipped gradients are from torch's."""
    plain = on_torch.load_model("llama-nano")
    on_torch.initialize(plain, torch.device("cpu"), 0)
    grads, found = gradients_of(plain, torch.float32), {}
    for name, arguments in PLANS.items():
        state = sharded(name, arguments)
        found[name] = [apart(state, plain, grads, kind) for kind in kinds]
    return found


def sharded(name: str, arguments: dict[str, Any]) -> on_torch.State:
    model = on_torch.load_model("llama-nano")
    strategy = "zero3" if name == "tensor" else name
    return on_torch.shard(model, fs.strategy(strategy, on_torch.describe(model), devices=dist.get_world_size(), **arguments))


def apart(state: on_torch.State, plain: nn.Module, grads: dict[str, Tensor], kind: float) -> tuple[float, float]:
    for name, p in plain.named_parameters():
        p.grad = grads[name].clone() if name in grads else None
    for name, p in state.model.named_parameters():
        whole = torch.distributed.tensor.distribute_tensor(grads[name], p.device_mesh, p.placements) if name in grads else None
        p.grad = whole
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=kind)
    norm = on_torch.clip_grad_norm_(state.parameters(), 0.5, norm_type=kind)
    clipped = {n: p.grad.full_tensor() for n, p in state.model.named_parameters() if p.grad is not None}
    far = max(float((clipped[n] - p.grad).abs().max()) for n, p in plain.named_parameters() if p.grad is not None)
    return float((norm - wanted).abs() / wanted), far


def refusals() -> dict[str, str]:
    state = sharded("zero3", {})
    for p in state.parameters():
        p.grad = torch.full_like(p, torch.inf)
    calls = {
        "zero": lambda: on_torch.clip_grad_norm_(state.parameters(), 1.0, norm_type=0.0),
        "text": lambda: on_torch.clip_grad_norm_(state.parameters(), 1.0, norm_type="two"),
        "none": lambda: on_torch.clip_grad_norm_([], 1.0),
        "not finite": lambda: on_torch.clip_grad_norm_(state.parameters(), 1.0, error_if_nonfinite=True),
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = str(call())
        except (fs.FullshardError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
