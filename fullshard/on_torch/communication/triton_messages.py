"""The Triton kernels of `message_kernel`: a message is packed or unpacked in one pass over memory.

A program works on a few whole blocks of a row, as a matrix of blocks × columns. The arithmetic is that of `BlockFormat`. It is
used only if it gives the same bits (`gives_torchs_bits`).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fullshard.on_torch.communication.block_quantization import LARGEST, TINY, BlockFormat, ErrorMeter
from fullshard.plan.choices import SCALE_BYTES

PROGRAM = 4096  # elements of a program, if a block has no more
WARP = 1024  # elements of a warp


@triton.jit
def _encode(values, LARGEST: tl.constexpr, TINY: tl.constexpr, FP8: tl.constexpr):
    """Scales (blocks × 1) and codes (int32) of fp32 values. Elements outside a block are 0."""
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)  # as integers NaN is the largest
    scales = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, LARGEST, tl.float32))
    scales = tl.where(scales < TINY, TINY, scales)  # NaN stays
    scaled = tl.div_rn(values, scales + tl.zeros_like(values))
    if FP8:  # as c10 does it: every GPU has integers, but only new ones have fp8
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
        codes = tl.where(size < (121 << 23), small, normal)
        codes = tl.where(size >= (1087 << 20), 0x7F, codes) | ((bits >> 24) & 0x80)
    else:
        rounded = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 · 2²³: half to even, in the low bits
        codes = tl.where(scaled == scaled, rounded, 0)
    return scales, codes


@triton.jit
def _decode(codes, scales, FP8: tl.constexpr):
    """Values in fp32. `codes`: int32 of signed bytes."""
    if FP8:
        size = codes & 0x7F
        small = (size.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2⁻⁹: the smallest code
        bits = tl.where(size < 8, small, (size << 20) + (120 << 23))
        bits = tl.where(size == 0x7F, 0x7FC00000, bits) | ((codes & 0x80) << 24)
        values = bits.to(tl.float32, bitcast=True)
    else:
        values = codes.to(tl.float32)
    return values * scales


@triton.jit
def _read(scales, codes, block, at, known, here, FP8: tl.constexpr):
    """Decode a part of a row. `scales`, `codes`: pointers to the first of each."""
    found = tl.load(codes + at, here, other=0).to(tl.int32)
    return _decode(found, tl.load(scales + block, known, other=0.0), FP8)


@triton.jit
def _write(scales, codes, values, block, at, known, here, LARGEST: tl.constexpr, TINY: tl.constexpr, FP8: tl.constexpr):
    """Encode a part of a row. Returns its values as they are decoded."""
    own_scales, own_codes = _encode(values, LARGEST, TINY, FP8)
    tl.store(scales + block, own_scales, known)
    tl.store(codes + at, own_codes.to(tl.int8), here)
    return _decode(own_codes, own_scales, FP8)


@triton.jit
def _places(elements, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """The blocks of this program (blocks × 1), the elements (blocks × columns), and which of both there are."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    at = block * BLOCK + column
    return block, at, block * BLOCK < elements, (column < BLOCK) & (at < elements)


@triton.jit
def _pack(
    values,
    scales,
    codes,
    kept_scales,
    kept_codes,
    squares,
    stride,
    words,
    blocks,
    elements,
    LARGEST: tl.constexpr,
    KEPT_LARGEST: tl.constexpr,
    TINY: tl.constexpr,
    FP8: tl.constexpr,
    FEEDBACK: tl.constexpr,
    METER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block, at, known, here = _places(elements, BLOCK, BLOCKS, COLUMNS)
    row = tl.program_id(1).to(tl.int64)
    x = tl.load(values + row * stride + at, here, other=0.0).to(tl.float32)
    scales, codes = scales + row * words, codes + (row * words + blocks) * 4
    kept_scales, kept_codes = kept_scales + row * words, kept_codes + (row * words + blocks) * 4
    if FEEDBACK:
        x = x + _read(kept_scales, kept_codes, block, at, known, here, False)
    lost = x - _write(scales, codes, x, block, at, known, here, LARGEST, TINY, FP8)
    if METER:
        program = squares + (row * tl.num_programs(0) + tl.program_id(0)) * 2
        lost_64, x_64 = lost.to(tl.float64), x.to(tl.float64)
        tl.store(program, tl.sum(tl.sum(lost_64 * lost_64, 1), 0))
        tl.store(program + 1, tl.sum(tl.sum(x_64 * x_64, 1), 0))
    if FEEDBACK:
        lost = tl.where(tl.abs(lost) < float("inf"), lost, 0.0)  # not for NaN
        _write(kept_scales, kept_codes, lost, block, at, known, here, KEPT_LARGEST, TINY, False)


@triton.jit
def _unpack(
    scales,
    codes,
    values,
    stride,
    words,
    blocks,
    elements,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block, at, known, here = _places(elements, BLOCK, BLOCKS, COLUMNS)
    row = tl.program_id(1).to(tl.int64)
    x = _read(scales + row * words, codes + (row * words + blocks) * 4, block, at, known, here, FP8)
    tl.store(values + row * stride + at, x.to(values.dtype.element_ty), here)


@triton.jit
def _unpack_sum(
    scales,
    codes,
    total,
    rows,
    words,
    blocks,
    elements,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block, at, known, here = _places(elements, BLOCK, BLOCKS, COLUMNS)
    codes += blocks * 4
    x = _read(scales, codes, block, at, known, here, FP8)
    for _ in range(1, rows):
        scales += words
        codes += tl.cast(words, tl.int64) * 4
        x += _read(scales, codes, block, at, known, here, FP8)
    tl.store(total + at, x.to(total.dtype.element_ty), here)


def pack(
    how: BlockFormat, values: Tensor, residual: Tensor | None = None, meter: ErrorMeter | None = None, into: Tensor | None = None
) -> Tensor:
    """As `BlockFormat.pack`. The elements of a row of values are contiguous."""
    rows, elements = values.shape
    message = how.message(rows, elements, values.device) if into is None else into
    if not elements:
        return message
    assert values.stride(1) == 1
    kept = message if residual is None else residual
    assert kept.shape == message.shape
    assert kept.stride() == message.stride()
    grid, metered = _grid(how, rows, elements), meter is not None and meter.on
    squares = torch.empty(math.prod(grid), 2, dtype=torch.float64, device=values.device) if metered else values
    _pack[grid](
        values,
        *_views(message),
        *_views(kept),
        squares,
        _row_stride(values),
        *_row_sizes(how, message, elements),
        LARGEST=LARGEST[how.code],
        KEPT_LARGEST=LARGEST["int8"],
        TINY=TINY,
        FEEDBACK=residual is not None,
        METER=metered,
        **_constants(how),
    )
    if meter is not None and metered:
        meter.add(how.kind, squares.sum(0))
    return message


def unpack(how: BlockFormat, message: Tensor, values: Tensor) -> None:
    """As `BlockFormat.unpack`. The elements of a row of values are contiguous."""
    rows, elements = values.shape
    if not elements:
        return
    assert values.stride(1) == 1
    arguments = (*_views(message), values, _row_stride(values), *_row_sizes(how, message, elements))
    _unpack[_grid(how, rows, elements)](*arguments, **_constants(how))


def unpack_sum(how: BlockFormat, message: Tensor, total: Tensor) -> None:
    """As `BlockFormat.unpack_sum`. The elements of the total are contiguous."""
    (elements,) = total.shape
    if not elements:
        return
    assert total.stride(0) == 1
    arguments = (*_views(message), total, len(message), *_row_sizes(how, message, elements))
    _unpack_sum[_grid(how, 1, elements)](*arguments, **_constants(how))


def _views(message: Tensor) -> tuple[Tensor, Tensor]:
    """A message as words, for its scales, and as signed bytes, for its codes."""
    return message.view(torch.float32), message.view(torch.int8)


def _row_sizes(how: BlockFormat, message: Tensor, elements: int) -> tuple[int, int, int]:
    """Of a row: its words, blocks and elements. Codes begin at a whole word, so that they are written four at a time."""
    assert message.shape[1] == how.wire.message_bytes(elements)
    return message.stride(0) // SCALE_BYTES, triton.cdiv(elements, how.wire.block), elements


def _row_stride(values: Tensor) -> int:
    return values.stride(0) if len(values) > 1 else 0  # Triton takes aligned loads if this is a multiple of 16


def _tile(how: BlockFormat) -> tuple[int, int]:
    """Blocks and columns of a program."""
    columns = triton.next_power_of_2(how.wire.block)
    return max(1, PROGRAM // columns), columns


def _grid(how: BlockFormat, rows: int, elements: int) -> tuple[int, int]:
    return triton.cdiv(triton.cdiv(elements, how.wire.block), _tile(how)[0]), rows


def _constants(how: BlockFormat) -> dict[str, int]:
    """The kernels' constants and options."""
    blocks, columns = _tile(how)
    return {
        "FP8": how.code == "fp8",
        "BLOCK": how.wire.block,
        "BLOCKS": blocks,
        "COLUMNS": columns,
        "num_warps": blocks * columns // WARP,
        "enable_fp_fusion": False,  # torch rounds each product before it adds
    }


def gives_torchs_bits(how: BlockFormat, device: torch.device) -> bool:
    """True if messages, residuals, values and sums have the bits of `BlockFormat`; tried with values of all sizes, zeros, and
    values that are not finite."""
    rows, elements = 3, 5 * how.wire.block + 7
    draw = torch.Generator(device).manual_seed(0)
    given = torch.randn(rows, elements, generator=draw, device=device) * torch.logspace(-42, 30, elements, device=device)
    given[1, : 2 * how.wire.block] = 0.0
    ours, torchs = (pack, unpack, unpack_sum), (BlockFormat.pack, BlockFormat.unpack, BlockFormat.unpack_sum)
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for dtype in (torch.bfloat16, torch.float32)
        for one, other in zip(_trial(ours, how, given.to(dtype)), _trial(torchs, how, given.to(dtype)), strict=True)
    )


def _trial(by: tuple[Callable[..., Any], ...], how: BlockFormat, given: Tensor) -> list[Tensor]:
    """What these functions make of values, of others, and of some that are not finite, each with a residual and without."""
    pack, unpack, unpack_sum = by
    rows, elements = given.shape
    used = SCALE_BYTES * triton.cdiv(elements, how.wire.block) + elements
    residual, bad, found = torch.zeros_like(how.message(rows, elements, given.device)), given.clone(), []
    bad[0, 3], bad[1, -1] = math.nan, math.inf
    for values in (given, given.flip(1), bad):
        for kept in (None, residual):
            message, unpacked, total = pack(how, values, kept), torch.empty_like(values), torch.empty_like(values[0])
            unpack(how, message, unpacked)
            unpack_sum(how, message, total)
            found += [unpacked.nan_to_num(7.0), total.nan_to_num(7.0), residual.clone()]  # NaN may have other bits
            if values is not bad:
                found.append(message[:, :used])
    return found
