"""A plain Llama: RMSNorm, RoPE, SwiGLU, grouped-query attention.

Parameter names and the rotation of heads are those of Hugging Face's `LlamaForCausalLM`, so that its
checkpoints load and ours export without any mapping. Shapes: B batch, T sequence, D dim, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.presets import LlamaSize


def rotary(sequence: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and frequency. Computed, not stored: a buffer would be one more
    thing that meta initialisation can leave unset."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.outer(torch.arange(sequence, device=device).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class Attention(nn.Module):
    def __init__(self, size: LlamaSize):
        super().__init__()
        self.head_dim = size.head_dim
        kv = size.kv_heads * size.head_dim
        self.q_proj = nn.Linear(size.dim, size.dim, bias=False)
        self.k_proj = nn.Linear(size.dim, kv, bias=False)
        self.v_proj = nn.Linear(size.dim, kv, bias=False)
        self.o_proj = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        # -1 heads: on a tensor-parallel rank these are that rank's heads.
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out_BHTD.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    def __init__(self, size: LlamaSize):
        super().__init__()
        self.gate_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, size: LlamaSize):
        super().__init__()
        self.self_attn = Attention(size)
        self.mlp = FeedForward(size)
        self.input_layernorm = nn.RMSNorm(size.dim, eps=size.eps)
        self.post_attention_layernorm = nn.RMSNorm(size.dim, eps=size.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, size: LlamaSize):
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(size.vocab, size.dim)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim, eps=size.eps)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.embed_tokens(ids_BT)
        cos, sin = rotary(ids_BT.shape[1], self.size.head_dim, self.size.theta, ids_BT.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.size = size
        self.model = Decoder(size)
        self.lm_head = nn.Linear(size.dim, size.vocab, bias=False)
        if size.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.lm_head(self.model(ids_BT))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
