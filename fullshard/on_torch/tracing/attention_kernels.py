"""The kernel that torch chooses on Hopper for `scaled_dot_product_attention`, and what it allocates and saves.

The choice was read from `torch._fused_sdp_choice` on an H200 with torch 2.11: cuDNN's kernel for half precision, heads of a
multiple of 8 up to 256, and masks without a gradient; flash attention for other heads up to 256, padded; the
memory-efficient kernel for fp32, larger heads, and masks with a gradient whose rows are contiguous (T5's are not). Keys with
fewer heads than queries are taken by cuDNN's alone, and only if the caller says `enable_gqa`. All else is matrix products and
a softmax in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `F.scaled_dot_product_attention`, with the kernel that CUDA would run."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    head, grouped = q.shape[-1], q.shape[1] != k.shape[1]
    learned = attn_mask is not None and attn_mask.requires_grad
    small = q.dtype in HALF and head <= LARGEST_HEAD
    scattered = attn_mask is not None and learned and attn_mask.stride(-1) != 1
    if (grouped and not enable_gqa) or q.shape[:1] != k.shape[:1] or scattered:
        return _by_products(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if small and head % 8 == 0 and not learned:
        bias = _bias(attn_mask, q)
        return aten._scaled_dot_product_cudnn_attention.default(q, k, v, bias, needs_grad, dropout_p, is_causal, scale=scale)[0]
    if grouped:
        return _by_products(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if small and attn_mask is None:
        return _padded_flash(q, k, v, dropout_p, is_causal, scale)
    bias = _bias(attn_mask, q)
    bias = bias if bias is None else bias.expand(*q.shape[:2], q.shape[2], k.shape[2])
    return aten._scaled_dot_product_efficient_attention.default(q, k, v, bias, needs_grad, dropout_p, is_causal, scale=scale)[0]


def _padded_flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    """Flash attention takes heads of a multiple of 8: torch pads them, and cuts the result."""
    head = q.shape[-1]
    padded = [F.pad(x, (0, -head % 8)) for x in (q, k, v)]
    scale = head**-0.5 if scale is None else scale
    out = aten._scaled_dot_product_flash_attention.default(*padded, dropout, causal, scale=scale)[0]
    return out[..., :head]


def _by_products(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """Matrix products and a softmax in fp32, in the order of torch's attention.cpp. Under a dispatch mode torch itself does not
    add the mask in place."""
    dtype, half = q.dtype, (scale or q.shape[-1] ** -0.5) ** 0.5
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype)
    if dtype in HALF:
        q, k, v = q.float(), k.float(), v.float()
    q = q * half
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        mask = torch.where(mask, 0.0, float("-inf"))
    if grouped and (groups := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ (k.transpose(-2, -1) * half)
    if mask is not None:
        scores.add_(mask)
    weights = torch._safe_softmax(scores, -1)
    del scores
    kept = aten.native_dropout.default(weights, dropout, True)[0] if dropout else weights
    out = (kept @ v).to(dtype)
    weights.to(dtype)  # torch returns the weights too
    return out


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A boolean mask is converted to the compute dtype, and that is kept for backward."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype)
