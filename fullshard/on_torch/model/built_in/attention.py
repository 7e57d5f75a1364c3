"""The attention of the built-in models: causal, and within one document where positions restart at 0."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = Tensor | BlockMask


def attend(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Mask | None = None, dropout: float = 0.0) -> Tensor:
    """Causal attention, or masked attention if a mask is given. Keys and values may have fewer heads than queries."""
    if isinstance(mask, BlockMask):
        return _compiled_flex()(q_BHTD, k_BHTD, v_BHTD, block_mask=mask, enable_gqa=True)
    return F.scaled_dot_product_attention(
        q_BHTD, k_BHTD, v_BHTD, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=True
    )


def document_mask(position_ids_BT: Tensor, *, dropout: float = 0.0) -> Mask:
    """A mask under which each token sees its own document up to itself. A document begins where positions restart at 0.

    On a GPU this is a block mask: flex attention skips blocks that are fully masked. Flex attention has no dropout, so
    with dropout the mask is a plain tensor.
    """
    document_BT = (position_ids_BT == 0).cumsum(-1)
    B, T = document_BT.shape
    if position_ids_BT.is_cuda and not dropout:

        def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (document_BT[b, q] == document_BT[b, k]) & (q >= k)

        return create_block_mask(same, B, None, T, T, device=str(document_BT.device))
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=document_BT.device).tril()
    return (document_BT[:, None, :, None] == document_BT[:, None, None, :]) & causal_TT


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """Flex attention, compiled. Uncompiled it would store the whole score matrix."""
    return torch.compile(flex_attention)
