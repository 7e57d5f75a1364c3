"""A plain Llama: RMSNorm, RoPE, SwiGLU, grouped-query attention.

Parameter names and the rotary layout are those of Hugging Face's `LlamaForCausalLM`, so checkpoints load and
export without renaming. Shapes: B batch, T sequence, D dim, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.model.presets import LlamaSize
from fullshard.on_torch.model.built_in.attention import Mask, attend, document_mask


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """The cosine and sine of every position and frequency.

    Computed in each forward. A stored buffer could be left uninitialised when the model comes from the meta device.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions.float().unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding, pairing the first half of a head with the second."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class LlamaAttention(nn.Module):
    def __init__(self, size: LlamaSize):
        super().__init__()
        self.head_dim = size.head_dim
        kv = size.kv_heads * size.head_dim
        self.q_proj = nn.Linear(size.dim, size.dim, bias=False)
        self.k_proj = nn.Linear(size.dim, kv, bias=False)
        self.v_proj = nn.Linear(size.dim, kv, bias=False)
        self.o_proj = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        B, T, _ = x.shape
        # -1: a tensor-parallel rank has only its own part of the heads.
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out_BHTD = attend(q, k, v, mask)
        return self.o_proj(out_BHTD.transpose(1, 2).reshape(B, T, -1))


class LlamaFeedForward(nn.Module):
    def __init__(self, size: LlamaSize):
        super().__init__()
        self.gate_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, size: LlamaSize):
        super().__init__()
        self.self_attn = LlamaAttention(size)
        self.mlp = LlamaFeedForward(size)
        self.input_layernorm = nn.RMSNorm(size.dim, eps=size.eps)
        self.post_attention_layernorm = nn.RMSNorm(size.dim, eps=size.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaDecoder(nn.Module):
    def __init__(self, size: LlamaSize):
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(size.vocab, size.dim)
        self.layers = nn.ModuleList(LlamaBlock(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=size.eps)

    def forward(self, ids_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed_tokens(ids_BT)
        if position_ids is None:
            mask, positions = None, torch.arange(ids_BT.shape[1], device=ids_BT.device)
        else:
            mask, positions = document_mask(position_ids), position_ids.unsqueeze(1)  # the same for all heads
        cos, sin = rotary(positions, self.size.head_dim, self.size.theta)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class Llama(nn.Module):
    """Token ids in, logits out. A document begins where `position_ids` is 0; attention never crosses documents."""

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.size = size
        self.model = LlamaDecoder(size)
        self.lm_head = nn.Linear(size.dim, size.vocab, bias=False)
        if size.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        if not self.lm_head.weight.is_meta:
            self.apply(self._init_weights)

    def forward(self, ids_BT: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.lm_head(self.model(ids_BT, position_ids))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
