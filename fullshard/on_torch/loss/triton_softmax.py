"""The Triton kernels of `softmax_loss`: of the loss, one program for each row, and of its gradient's factor."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # columns at a time
WARPS = 16
SCALED = 4096  # elements that a program scales
LOWEST = -3.0e38  # below every logit; infinity minus infinity would be no number


@triton.jit
def _loss_and_gradient(logits, labels, losses, stride, ignored, COLUMNS: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at_row = logits + row * stride
    label = tl.load(labels + row)
    counts = label != ignored
    known = (label >= 0) & (label < COLUMNS)
    own = tl.load(at_row + label, mask=known, other=float("nan")).to(tl.float32)  # an unknown label makes no number
    most = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, COLUMNS, 4 * BLOCK):  # four at a time: what is summed already is rescaled once for them
        at = start + tl.arange(0, BLOCK)
        a = tl.load(at_row + at, mask=at < COLUMNS, other=float("-inf")).to(tl.float32)
        b = tl.load(at_row + at + BLOCK, mask=at + BLOCK < COLUMNS, other=float("-inf")).to(tl.float32)
        c = tl.load(at_row + at + 2 * BLOCK, mask=at + 2 * BLOCK < COLUMNS, other=float("-inf")).to(tl.float32)
        d = tl.load(at_row + at + 3 * BLOCK, mask=at + 3 * BLOCK < COLUMNS, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(tl.maximum(tl.maximum(most, a), tl.maximum(b, c)), d)
        pairs = (tl.exp(a - higher) + tl.exp(b - higher)) + (tl.exp(c - higher) + tl.exp(d - higher))
        total = total * tl.exp(most - higher) + pairs
        most = higher
    top = tl.max(most, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
    tl.store(losses + row, tl.where(counts, lse - own, 0.0))
    for start in range(0, COLUMNS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < COLUMNS
        x = tl.load(at_row + at, mask=here, other=0.0).to(tl.float32)
        g = tl.exp(x - lse) - tl.where(at == label, 1.0, 0.0)
        tl.store(at_row + at, tl.where(counts, g, 0.0).to(logits.dtype.element_ty), mask=here)


def loss_and_gradient(logits_CV: Tensor, labels_C: Tensor, ignored: int) -> Tensor:
    """See `softmax_loss_`. A row of logits is contiguous."""
    losses_C = labels_C.new_empty(labels_C.shape, dtype=torch.float32)
    rows, columns = logits_CV.shape
    if not rows:
        return losses_C
    assert logits_CV.stride(1) == 1
    _loss_and_gradient[(rows,)](
        logits_CV,
        labels_C.contiguous(),
        losses_C,
        logits_CV.stride(0),
        ignored,
        COLUMNS=columns,
        LOWEST=LOWEST,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        num_warps=WARPS if columns >= 2 * BLOCK else 4,
    )
    return losses_C


@triton.jit
def _scale(values, factor, scaled, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    x = tl.load(values + at, here, other=0.0) * tl.load(factor)
    tl.store(scaled + at, x.to(scaled.dtype.element_ty), here)


def scaled(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """See `softmax_loss.scaled`. The values are contiguous."""
    found = torch.empty_like(values, dtype=dtype)
    assert values.is_contiguous()
    assert factor.dtype is torch.float32
    if values.numel():
        _scale[(triton.cdiv(values.numel(), SCALED),)](values, factor, found, values.numel(), BLOCK=SCALED, num_warps=8)
    return found


def try_it() -> None:
    """Compile and run the kernels once. Raises if this machine cannot."""
    losses = loss_and_gradient(torch.zeros(1, 8, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda"), -100)
    scaled(losses, losses[0], torch.bfloat16)
