"""`LowBitRule.update_by_torch` on a GPU, in one pass over memory: unscale, clip, decode, update and encode.

The arithmetic is that of torch's fused Adam (`triton_adam`) and of `moment_codes`. It is used only if it gives the bits of both
(`gives_torchs_bits`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullshard.on_torch.optimizers.low_bit_update import LowBitRule
from fullshard.on_torch.optimizers.moment_codes import ElementRange, halves
from fullshard.on_torch.optimizers.triton_adam import SETTINGS, TRIAL, adam_step
from fullshard.on_torch.optimizers.triton_one_pass import step_powers

ROWS = 4  # blocks of a program
KINDS = {"fp32": 0, "bf16": 1, "int8": 2}


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _decode(stored, row, column, at, here, rows_here, KIND: tl.constexpr, SIGNED: tl.constexpr, BINADES: tl.constexpr):
    if KIND == 2:
        codes = tl.load(stored + row * 260 + 4 + column, here, other=0).to(tl.int32)
        scale = tl.load((stored + row * 260).to(tl.pointer_type(tl.int32)), rows_here, other=0)
        sizes = codes
        if SIGNED:
            sizes = codes & 127
        bits = (sizes << 20) + scale - ((BINADES - 1) << 23)
        bits = tl.where(sizes == 0, 0, bits)
        if SIGNED:
            bits = bits | ((codes & 128) << 24)
        values = bits.to(tl.float32, bitcast=True)
    else:
        values = tl.load(stored + at, here, other=0.0).to(tl.float32)
    return values


@triton.jit
def _encode(
    stored, values, random, row, column, at, here, rows_here, KIND: tl.constexpr, SIGNED: tl.constexpr, BINADES: tl.constexpr
):
    bits = values.to(tl.int32, bitcast=True)
    if KIND == 2:
        sizes = tl.where(here, bits & 0x7FFFFFFF, 0)
        largest = tl.minimum(tl.max(sizes, 1, keep_dims=True), 0x7F800000)
        scale = tl.maximum((largest + 0xFFFFF) >> 23, 64) << 23
        base = scale - ((BINADES - 1) << 23) + tl.zeros_like(sizes)
        smallest = base + (1 << 20)
        codes = (sizes - base + (random << 4)) >> 20
        below = (sizes > 0).to(tl.int32)
        if SIGNED:
            low = smallest.to(tl.float32, bitcast=True)
            chance = sizes.to(tl.float32, bitcast=True) * tl.div_rn(tl.full(low.shape, 65536.0, tl.float32), low)
            below = (chance > random.to(tl.float32)).to(tl.int32)
        codes = tl.where(sizes < smallest, below, codes)
        if SIGNED:
            codes = codes | ((bits >> 24) & 128)
        whole_rows = rows_here & (column >= 0)
        tl.store(stored + row * 260 + 4 + column, codes.to(tl.uint8), whole_rows)
        tl.store((stored + row * 260).to(tl.pointer_type(tl.int32)), scale, rows_here)
    elif KIND == 1:
        tl.store(stored + at, ((bits + random) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), here)
    else:
        tl.store(stored + at, values, here)


@triton.jit
def _update(
    parameter,
    gradient,
    first,
    second,
    factors,
    skip,
    powers,
    steps,
    seed,
    origin,
    columns,
    stride,
    count,
    start,
    lr,
    beta1,
    beta2,
    decay,
    eps,
    FACTORS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    DECAYS: tl.constexpr,
    KIND: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ONE_RUN: tl.constexpr,
    ROWS: tl.constexpr,
):
    if tl.load(skip) == 0:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, 256)[None, :]
        at = row * 256 + column
        here = at < count
        rows_here = row * 256 < count
        p = tl.load(parameter + at, here, other=0.0).to(tl.float32)
        g = tl.load(gradient + at, here, other=0.0).to(tl.float32)
        for i in tl.static_range(FACTORS):
            g = g * tl.load(factors + i)
        m = _decode(first, row, column, at, here, rows_here, KIND, True, 16)
        v = _decode(second, row, column, at, here, rows_here, KIND, False, 32)
        p, m, v = adam_step(p, g, m, v, powers, lr, beta1, beta2, decay, eps, DECOUPLED, DECAYS)

        part = at + start
        index = origin + part
        if not ONE_RUN:
            index = origin + part // columns * stride + part % columns
        index = index.to(tl.uint32)
        key = _mix((seed + tl.load(steps).to(tl.int64) * 0x9E3779B9).to(tl.uint32))
        random = _mix(index ^ key)
        _encode(first, m, (random & 0xFFFF).to(tl.int32), row, column, at, here, rows_here, KIND, True, 16)
        _encode(second, v, (random >> 16).to(tl.int32), row, column, at, here, rows_here, KIND, False, 32)
        if STOCHASTIC:
            other = (_mix(index ^ _mix(key + 1)) & 0xFFFF).to(tl.int32)
            rounded = (p.to(tl.int32, bitcast=True) + other) >> 16
            tl.store(parameter + at, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), here)
        else:
            tl.store(parameter + at, p.to(parameter.dtype.element_ty), here)


def update_low_bit(
    how: LowBitRule,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    factors: Tensor | None,
    skip: Tensor,
    powers: Tensor,
    steps: Tensor,
    group: dict[str, Any],
    elements: ElementRange,
    start: int = 0,
) -> None:
    """Update flat master and stored moments in place. `tensors`: master, gradient and both moments. `skip`: 0, or nothing
    changes. `powers`: both betas to the power of the step. `steps`: the step, on the device. `start`: as of `LowBitRule`."""
    master, (beta1, beta2), decay = tensors[0], group["betas"], group["weight_decay"]
    if not master.numel():
        return
    _update[(triton.cdiv(master.numel(), ROWS * 256),)](
        *tensors,
        skip if factors is None else factors,
        skip,
        powers,
        steps,
        elements.seed,
        elements.first,
        elements.columns,
        elements.stride,
        master.numel(),
        start,
        float(group["lr"]),
        beta1,
        beta2,
        decay,
        group["eps"],
        FACTORS=0 if factors is None else factors.numel(),
        DECOUPLED=how.rule.kind == "adamw",
        DECAYS=decay != 0,
        KIND=KINDS[how.moments.kind],
        STOCHASTIC=how.stochastic,
        ONE_RUN=elements.columns == elements.stride,
        ROWS=ROWS,
        enable_fp_fusion=False,  # the kernel fuses explicitly, where torch's does
    )


def gives_torchs_bits(how: LowBitRule, master: torch.dtype, device: torch.device) -> bool:
    """True if three steps give the bits of `LowBitRule.update_by_torch`, tried with values of all sizes."""
    generator = torch.Generator(device).manual_seed(0)
    size, scale = TRIAL - 100, torch.logspace(-9, 3, TRIAL - 100, device=device)
    p, m, v, g = (torch.randn(size, generator=generator, device=device) * scale for _ in range(4))
    place, off = ElementRange(12345, 7, 100, 300), torch.zeros((), device=device)
    found = []
    for by_triton in (True, False):
        own, moments = p.to(master), []
        for i, (values, bits) in enumerate(zip((m, v.square()), halves(place.random(0, 0, size, device)), strict=True)):
            moments.append(torch.zeros(how.moments.size(size), dtype=how.moments.dtype, device=device))
            how.moments.encode(values.clone(), bits, moments[-1], signed=i == 0)
        factors = torch.tensor([0.7, 3.0], device=device)
        for step in (1, 2, 1000):
            if by_triton:
                steps = torch.full((), float(step), device=device)
                powers = step_powers([steps], SETTINGS)[0]
                update_low_bit(how, (own, g, moments[0], moments[1]), factors, off, powers, steps, SETTINGS, place, 256)
            else:
                how.update_by_torch(own, g, moments, step, SETTINGS, place, list(factors), 256)
        found.append([own, *moments])
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*found, strict=True))
