"""A plain Llama on NNX: RMSNorm, RoPE, SwiGLU, grouped-query attention.

Parameter names and layouts are those of `on_torch`'s Llama and of Hugging Face's, so checkpoints need no mapping. Shapes: B
batch, T sequence, D dim, H heads.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.model.presets import LlamaSize
from fullshard.on_jax.models.layers import OutputHead, Projection, RootMeanSquareNorm, TokenEmbedding, attend


def rotary(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """The cosine and sine of every position and frequency."""
    frequencies = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]


def rotate(x_BTHD: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply rotary position embedding, pairing the first half of a head with the second."""
    a, b = jnp.split(x_BTHD.astype(jnp.float32), 2, -1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(x_BTHD.dtype)


class NnxLlamaAttention(nnx.Module):
    def __init__(self, size: LlamaSize, *, rngs: nnx.Rngs):
        self.head_dim = size.head_dim
        kv = size.kv_heads * size.head_dim
        self.q_proj = Projection(size.dim, size.dim, rngs=rngs)
        self.k_proj = Projection(size.dim, kv, rngs=rngs)
        self.v_proj = Projection(size.dim, kv, rngs=rngs)
        self.o_proj = Projection(size.dim, size.dim, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        B, T, _ = x.shape
        q, k, v = (proj(x).reshape(B, T, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(rotate(q, cos, sin), rotate(k, cos, sin), v).reshape(B, T, -1))


class NnxLlamaFeedForward(nnx.Module):
    def __init__(self, size: LlamaSize, *, rngs: nnx.Rngs):
        self.gate_proj = Projection(size.dim, size.ffn, rngs=rngs)
        self.up_proj = Projection(size.dim, size.ffn, rngs=rngs)
        self.down_proj = Projection(size.ffn, size.dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class NnxLlamaBlock(nnx.Module):
    def __init__(self, size: LlamaSize, *, rngs: nnx.Rngs):
        self.self_attn = NnxLlamaAttention(size, rngs=rngs)
        self.mlp = NnxLlamaFeedForward(size, rngs=rngs)
        self.input_layernorm = RootMeanSquareNorm(size.dim, size.eps)
        self.post_attention_layernorm = RootMeanSquareNorm(size.dim, size.eps)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class NnxLlamaDecoder(nnx.Module):
    def __init__(self, size: LlamaSize, *, rngs: nnx.Rngs):
        self.size = size
        self.embed_tokens = TokenEmbedding(size.vocab, size.dim, rngs=rngs)
        self.layers = nnx.List([NnxLlamaBlock(size, rngs=rngs) for _ in range(size.layers)])
        self.norm = RootMeanSquareNorm(size.dim, size.eps)

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        x = self.embed_tokens(ids_BT)
        cos, sin = rotary(jnp.arange(ids_BT.shape[1]), self.size.head_dim, self.size.theta)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class NnxLlama(nnx.Module):
    """Token ids in, logits out; with `labels`, their summed loss."""

    def __init__(self, size: LlamaSize, *, rngs: nnx.Rngs):
        self.size = size
        self.model = NnxLlamaDecoder(size, rngs=rngs)
        self.lm_head = OutputHead(size.dim, size.vocab, rngs=rngs)
        if size.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def __call__(self, ids_BT: jax.Array, labels: jax.Array | None = None) -> jax.Array:
        return self.lm_head(self.model(ids_BT), labels=labels)
