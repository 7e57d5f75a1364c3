"""An Adam update by the GPU in one pass over memory: state, gradient and parameter of a packed piece.

Torch's kernels need a dozen passes: to collect gradients and parameters, to unpack, update, narrow and pack. They take device
memory bandwidth from forward and backward, which run at the same time. This Triton kernel repeats the arithmetic of torch's
fused Adam. It is used only if it gives the same bits (`agrees`). With weight decay a few results differ by one rounding:
torch's binary fuses the decay's multiplication and addition for some elements only, this kernel for all.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullshard.on_torch.optimizers.adam_update import Rule, apply_rule
from fullshard.on_torch.optimizers.packed_masters import pack, unpack

BLOCK = 1024  # elements of a program
TRIAL = 1 << 16  # elements
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


@triton.jit
def adam_step(p, g, m, v, powers, lr, beta1, beta2, decay, eps, DECOUPLED: tl.constexpr, DECAYS: tl.constexpr):
    """Parameter and moments after a step. Fused where torch's kernel is; `powers`: both betas to the power of the step."""
    if DECAYS and DECOUPLED:
        p = tl.fma(-(lr * decay) + tl.zeros_like(p), p, p)
    elif DECAYS:
        g = tl.fma(p, decay + tl.zeros_like(p), g)
    b1, b2 = beta1 + tl.zeros_like(p), beta2 + tl.zeros_like(p)
    square = g * g
    m = tl.fma(b1, m, tl.fma(-b1, g, g))
    v = tl.fma(b2, v, tl.fma(-b2, square, square))
    rate = tl.div_rn(lr, 1 - tl.load(powers))
    root = tl.sqrt_rn(1 - tl.load(powers + 1))
    p = p - tl.div_rn(rate * m, tl.div_rn(tl.sqrt_rn(v), root + tl.zeros_like(v)) + eps)
    return p, m, v


@triton.jit
def _update(
    gradient,
    rounded,
    low,
    first,
    second,
    factors,
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
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    mark = tl.load(second + at, here, other=0)
    half = tl.load(low + at, here, other=0).to(tl.int32)
    from_above = (half == -32768) & (mark < 0)
    bits = (tl.load(rounded + at, here, other=0).to(tl.int32) << 16) + half + tl.where(from_above, 65536, 0)
    p = bits.to(tl.float32, bitcast=True)
    v = (mark & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    m = tl.load(first + at, here, other=0.0)
    g = tl.load(gradient + at, here, other=0.0).to(tl.float32)
    for i in tl.static_range(FACTORS):
        g = g * tl.load(factors + i)

    p, m, v = adam_step(p, g, m, v, powers, lr, beta1, beta2, decay, eps, DECOUPLED, DECAYS)

    bits = p.to(tl.int32, bitcast=True)
    new = p.to(tl.bfloat16).to(tl.int16, bitcast=True)
    half = (bits << 16) >> 16
    from_above = (half == -32768) & (new.to(tl.int32) == (bits >> 16))
    tl.store(first + at, m, here)
    tl.store(second + at, v.to(tl.int32, bitcast=True) | tl.where(from_above, -2147483648, 0), here)
    tl.store(low + at, half.to(tl.int16), here)
    tl.store(rounded + at, new, here)


def update_packed(
    rule: Rule,
    gradient: Tensor,
    rounded: Tensor,
    state: Sequence[Tensor],
    factors: Tensor | None,
    step: int,
    group: dict[str, Any],
) -> None:
    """Update a run of a packed piece in place; all tensors are flat. `rounded`, its parameters, and `state`, low halves and
    moments, come from `words`. `factors`: on the gradient, one after the other. `step`, `group`: see `apply_rule`."""
    low, first, second = state
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    _update[(triton.cdiv(low.numel(), BLOCK),)](
        gradient,
        rounded,
        low,
        first,
        second,
        low if factors is None else factors,
        _powers(beta1, beta2, step, torch.cuda.current_stream(low.device)),
        low.numel(),
        float(group["lr"]),
        beta1,
        beta2,
        decay,
        group["eps"],
        FACTORS=0 if factors is None else factors.numel(),
        DECOUPLED=rule.kind == "adamw",
        DECAYS=decay != 0,
        BLOCK=BLOCK,
        enable_fp_fusion=False,  # the kernel fuses explicitly, where torch's does
    )


def words(rounded: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Parameters and state as the kernel takes them, as integers where it works on bits."""
    low, first, second = state
    return rounded.view(torch.int16), [low, first, second.view(torch.int32)]


@lru_cache(maxsize=16)
def _powers(beta1: float, beta2: float, step: int, stream: torch.cuda.Stream) -> Tensor:
    """Both betas to the power of `step`, by torch's function: others differ in the last bit. Cached for each stream."""
    return torch.pow(_betas(beta1, beta2, stream.device), torch.full((2,), float(step), device=stream.device))


@cache
def _betas(beta1: float, beta2: float, device: torch.device) -> Tensor:
    return torch.tensor([beta1, beta2], dtype=torch.float32, device=device)


@cache
def agrees(rule: Rule, device: torch.device) -> bool:
    """True if the kernel gives the same bits as torch's on this device; tried with values of all sizes, ties among them."""
    generator = torch.Generator(device).manual_seed(0)
    master, first, second, gradient = (torch.randn(TRIAL, generator=generator, device=device) for _ in range(4))
    scale = torch.logspace(-12, 4, TRIAL, device=device)
    master[::2], second = master[::2] * scale[::2], (second * scale.flip(0)).square()
    master.view(torch.int32)[::3] = (master.view(torch.int32)[::3] & ~0xFFFF) | 0x8000  # in the middle between two bf16 values
    first, gradient = first * scale.sqrt(), (gradient * scale).to(torch.bfloat16)
    factors = torch.tensor([0.7, 3.0], device=device)
    rounded, low = master.to(torch.bfloat16), torch.empty(TRIAL, dtype=torch.int16, device=device)
    pack(master, rounded, low, second)
    ours = [t.clone() for t in (rounded, low, first, second)]
    for step in (1, 2, 1000):
        update_packed(rule, gradient, *words(ours[0], ours[1:]), factors, step, SETTINGS)
        unpack(rounded, low, second, master)
        apply_rule(rule, master, gradient.float() * 0.7 * 3.0, [first, second], step, SETTINGS)
        rounded.copy_(master)
        pack(master, rounded, low, second)
    pairs = zip(ours, (rounded, low, first, second), strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
