"""Llama and its relatives on NNX: RMSNorm, RoPE, SwiGLU, grouped-query attention.

Parameter names and layouts are those of `on_torch`'s Llama and of transformers' Llama, Mistral, Qwen2 and Qwen3, so
checkpoints need no mapping. Shapes: B batch, T sequence, D dim, H heads.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.model.presets import LlamaSize
from fullshard.on_jax.model.built_in.layers import ACTIVATIONS, STD, OutputHead, Projection, RootMeanSquareNorm, TokenEmbedding
from fullshard.on_jax.model.built_in.nnx_attention import attend, document_numbers
from fullshard.on_jax.model.built_in.rope import UNSCALED, RopeScaling, rotary, rotate
from fullshard.on_jax.model.scanned_layers import scan_layers


@dataclass(frozen=True)
class NnxLlamaSize(LlamaSize):
    """A Llama with what its relatives have besides. `norm_heads`: queries and keys are normed, as in Qwen3."""

    head_size: int | None = None  # dim / heads if None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_heads: bool = False
    activation: str = "silu"
    attention_dropout: float = 0.0
    padding: int | None = None  # the token whose embedding gets no gradient
    std: float = STD  # of initial weights
    rope: RopeScaling = UNSCALED

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads if self.head_size is None else self.head_size


class NnxLlamaAttention(nnx.Module):
    def __init__(self, size: NnxLlamaSize, *, rngs: nnx.Rngs):
        self.head_dim = size.head_dim
        heads, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
        self.q_proj = Projection(size.dim, heads, bias=size.qkv_bias, std=size.std, rngs=rngs)
        self.k_proj = Projection(size.dim, kv, bias=size.qkv_bias, std=size.std, rngs=rngs)
        self.v_proj = Projection(size.dim, kv, bias=size.qkv_bias, std=size.std, rngs=rngs)
        self.o_proj = Projection(heads, size.dim, bias=size.output_bias, std=size.std, rngs=rngs)
        self.q_norm = RootMeanSquareNorm(size.head_dim, size.eps) if size.norm_heads else None
        self.k_norm = RootMeanSquareNorm(size.head_dim, size.eps) if size.norm_heads else None
        self.dropout = nnx.Dropout(size.attention_dropout, rngs=rngs) if size.attention_dropout else None

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, documents_BT: jax.Array | None = None) -> jax.Array:
        B, T, _ = x.shape
        q, k, v = (proj(x).reshape(B, T, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.o_proj(attend(q, k, v, documents_BT, dropout=self.dropout).reshape(B, T, -1))


class NnxLlamaFeedForward(nnx.Module):
    def __init__(self, size: NnxLlamaSize, *, rngs: nnx.Rngs):
        self.activation = size.activation
        self.gate_proj = Projection(size.dim, size.ffn, bias=size.mlp_bias, std=size.std, rngs=rngs)
        self.up_proj = Projection(size.dim, size.ffn, bias=size.mlp_bias, std=size.std, rngs=rngs)
        self.down_proj = Projection(size.ffn, size.dim, bias=size.mlp_bias, std=size.std, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class NnxLlamaBlock(nnx.Module):
    def __init__(self, size: NnxLlamaSize, *, rngs: nnx.Rngs):
        self.self_attn = NnxLlamaAttention(size, rngs=rngs)
        self.mlp = NnxLlamaFeedForward(size, rngs=rngs)
        self.input_layernorm = RootMeanSquareNorm(size.dim, size.eps)
        self.post_attention_layernorm = RootMeanSquareNorm(size.dim, size.eps)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, documents_BT: jax.Array | None = None) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, documents_BT)
        return x + self.mlp(self.post_attention_layernorm(x))


class NnxLlamaDecoder(nnx.Module):
    def __init__(self, size: NnxLlamaSize, *, rngs: nnx.Rngs):
        self.size = size
        self.embed_tokens = TokenEmbedding(size.vocab, size.dim, padding=size.padding, std=size.std, rngs=rngs)
        self.layers = nnx.List([NnxLlamaBlock(size, rngs=rngs) for _ in range(size.layers)])
        self.norm = RootMeanSquareNorm(size.dim, size.eps)

    def __call__(self, ids_BT: jax.Array, position_ids: jax.Array | None = None) -> jax.Array:
        x = self.embed_tokens(ids_BT)
        documents_BT = None if position_ids is None else document_numbers(position_ids)
        positions = jnp.arange(ids_BT.shape[1]) if position_ids is None else position_ids
        cos, sin = rotary(positions, self.size.head_dim, self.size.theta, self.size.rope)
        return self.norm(scan_layers(self.layers, x, cos, sin, documents_BT))


class NnxLlama(nnx.Module):
    """Token ids in, logits out; with `labels`, their summed loss; with `logits_at`, the logits of that position alone.

    A document begins where `position_ids` is 0; attention never crosses documents.
    """

    def __init__(self, size: LlamaSize, *, rngs: nnx.Rngs):
        self.size = size
        full = size if isinstance(size, NnxLlamaSize) else NnxLlamaSize(**vars(size))
        self.model = NnxLlamaDecoder(full, rngs=rngs)
        self.lm_head = OutputHead(size.dim, size.vocab, std=full.std, rngs=rngs)
        if size.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def __call__(
        self,
        ids_BT: jax.Array,
        labels: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> jax.Array:
        return self.lm_head(self.model(ids_BT, position_ids), labels=labels, at=logits_at)
