"""Unscale, clip and update a resident parameter in one pass over memory.

Torch scales all gradients first, and its fused Adam reads them again. This kernel reads the factors and whether to skip from
the device, and repeats the arithmetic of torch's kernel (`triton_adam`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullshard.on_torch.optimizers.adam_update import Rule, apply_rule
from fullshard.on_torch.optimizers.triton_adam import SETTINGS, TRIAL, adam_step

BLOCK = 1024  # elements of a program


@triton.jit
def _update(
    parameter,
    gradient,
    first,
    second,
    factors,
    skip,
    powers,
    count,
    lr,
    beta1,
    beta2,
    decay,
    eps,
    FACTORS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    DECAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(skip) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < count
        p = tl.load(parameter + at, here, other=0.0)
        m = tl.load(first + at, here, other=0.0)
        v = tl.load(second + at, here, other=0.0)
        g = tl.load(gradient + at, here, other=0.0).to(tl.float32)
        for i in tl.static_range(FACTORS):
            g = g * tl.load(factors + i)
        p, m, v = adam_step(p, g, m, v, powers, lr, beta1, beta2, decay, eps, DECOUPLED, DECAYS)
        tl.store(parameter + at, p, here)
        tl.store(first + at, m, here)
        tl.store(second + at, v, here)


def update_parameter(
    kind: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    factors: Tensor | None,
    skip: Tensor,
    powers: Tensor,
    group: dict[str, Any],
) -> None:
    """Update one parameter in place. `tensors`: parameter, gradient and both moments, contiguous. `factors`: on the gradient,
    one after the other. `skip`: 0, or nothing changes. `powers`: both betas to the power of the step. `group`: as torch's."""
    parameter, (beta1, beta2), decay = tensors[0], group["betas"], group["weight_decay"]
    if not parameter.numel():
        return
    _update[(triton.cdiv(parameter.numel(), BLOCK),)](
        *tensors,
        skip if factors is None else factors,
        skip,
        powers,
        parameter.numel(),
        float(group["lr"]),
        beta1,
        beta2,
        decay,
        group["eps"],
        FACTORS=0 if factors is None else factors.numel(),
        DECOUPLED=kind == "adamw",
        DECAYS=decay != 0,
        BLOCK=BLOCK,
        enable_fp_fusion=False,  # the kernel fuses explicitly, where torch's does
    )


def step_powers(steps: list[Tensor], group: dict[str, Any]) -> Tensor:
    """A row for each parameter: both betas to the power of its step, by torch's function; others differ in the last bit."""
    counts = torch.stack(steps)
    betas = torch.tensor(group["betas"], dtype=torch.float32).to(counts.device, non_blocking=True)
    return torch.pow(betas.unsqueeze(0), counts.unsqueeze(1))


def gives_torchs_bits(kind: str, device: torch.device) -> bool:
    """True if three steps give the bits of torch's fused kernel, tried with values of all sizes."""
    generator = torch.Generator(device).manual_seed(0)
    p, m, v, g = (torch.randn(TRIAL, generator=generator, device=device) for _ in range(4))
    scale = torch.logspace(-12, 4, TRIAL, device=device)
    p[::2], m, v, g = p[::2] * scale[::2], m * scale.sqrt(), (v * scale.flip(0)).square(), g * scale
    factors, off = torch.tensor([0.7, 3.0], device=device), torch.zeros((), device=device)
    ours = [t.clone() for t in (p, m, v)]
    for step in (1, 2, 1000):
        powers = step_powers([torch.full((), float(step), device=device)], SETTINGS)[0]
        update_parameter(kind, (ours[0], g, ours[1], ours[2]), factors, off, powers, SETTINGS)
        apply_rule(Rule(kind, ("exp_avg", "exp_avg_sq")), p, g * 0.7 * 3.0, [m, v], step, SETTINGS)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(ours, (p, m, v), strict=True))
