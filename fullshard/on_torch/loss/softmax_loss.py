"""Cross-entropy and its gradient in place of the logits, as one operator.

Torch's own needs a copy of the logits in float32, and five passes over it. On a GPU this is one Triton kernel that reads the
logits twice and writes them once; on a CPU, and without Triton, torch's functions on a few rows at a time.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from fullshard.on_torch.loss.losses import IGNORED
from fullshard.on_torch.tensors.usable_kernel import Found, usable_kernel

ELEMENTS = 1 << 22  # of the rows that torch's functions work on at a time


@torch.library.custom_op("fullshard::softmax_loss_", mutates_args={"logits_CV"})
def softmax_loss_(logits_CV: Tensor, labels_C: Tensor, by_torch: bool = False) -> Tensor:
    """The loss of each row, in float32; the logits become its gradient. Both are 0 where the label is `IGNORED`. `by_torch`: by
    torch's functions in any case."""
    kernel = find_softmax()[0] if logits_CV.is_cuda and not by_torch else None
    return _by_rows(logits_CV, labels_C) if kernel is None else kernel.loss_and_gradient(logits_CV, labels_C, IGNORED)


@softmax_loss_.register_fake
def _(logits_CV: Tensor, labels_C: Tensor, by_torch: bool = False) -> Tensor:
    return labels_C.new_empty(labels_C.shape, dtype=torch.float32)


@torch.library.custom_op("fullshard::scaled", mutates_args=())
def scaled(values: Tensor, factor: Tensor, dtype: torch.dtype, by_torch: bool = False) -> Tensor:
    """`values * factor` in a narrower dtype, in one pass. `values`: in float32. `factor`: of one element."""
    kernel = find_softmax()[0] if values.is_cuda and not by_torch else None
    if kernel is None:
        return torch.mul(values, factor, out=torch.empty_like(values, dtype=dtype))
    return kernel.scaled(values.contiguous(), factor.float(), dtype)


@scaled.register_fake
def _(values: Tensor, factor: Tensor, dtype: torch.dtype, by_torch: bool = False) -> Tensor:
    return torch.empty_like(values, dtype=dtype)


@cache
def find_softmax() -> Found:
    """The module `triton_softmax`, or None and the reason."""

    def find() -> ModuleType | None:
        from fullshard.on_torch.loss import triton_softmax

        triton_softmax.try_it()
        return triton_softmax

    return usable_kernel("the loss", find)


def _by_rows(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    losses_C = labels_C.new_empty(labels_C.shape, dtype=torch.float32)
    rows = max(1, ELEMENTS // logits_CV.shape[1])
    for i in range(0, len(logits_CV), rows):
        part = slice(i, i + rows)
        counted_R1 = (labels_C[part] != IGNORED).float().unsqueeze(1)
        column_R1 = labels_C[part].clamp(min=0).unsqueeze(1)
        logp_RV = torch.log_softmax(logits_CV[part], -1, dtype=torch.float32)
        losses_C[part] = -(logp_RV.gather(1, column_R1) * counted_R1).squeeze(1)
        logits_CV[part] = logp_RV.exp_().scatter_add_(1, column_R1, -torch.ones_like(counted_R1)).mul_(counted_R1)
    return losses_C
