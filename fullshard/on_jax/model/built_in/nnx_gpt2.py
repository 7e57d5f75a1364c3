"""GPT-2 on NNX, as transformers has it: parameter names, layouts and computation are those of `GPT2LMHeadModel`."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.on_jax.model.built_in.layers import ACTIVATIONS, STD, MeanNorm, OutputHead, TokenEmbedding, TransposedProjection
from fullshard.on_jax.model.built_in.nnx_attention import attend, document_numbers
from fullshard.on_jax.model.built_in.nnx_gpt import refuse_too_long
from fullshard.on_jax.model.scanned_layers import scan_layers


@dataclass(frozen=True)
class NnxGPT2Size:
    """LayerNorm, learned positions, fused queries, keys and values. The fields of transformers' `GPT2Config`."""

    dim: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    sequence: int = 1024
    activation: str = "gelu_new"
    eps: float = 1e-5
    tied: bool = True
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    scale_by_head: bool = True  # scale_attn_weights
    scale_by_layer: bool = False  # scale_attn_by_inverse_layer_idx
    std: float = STD  # of initial weights

    @property
    def residual_std(self) -> float:
        """Of the initial weights of layers that add to the residual: two in each block."""
        return self.std / math.sqrt(2 * self.layers)

    def score_scale(self, layer: int) -> float:
        """What the scores of a layer's attention are multiplied by."""
        by_head = 1 / math.sqrt(self.dim // self.heads) if self.scale_by_head else 1.0
        return by_head / (layer + 1) if self.scale_by_layer else by_head


class NnxGPT2Attention(nnx.Module):
    def __init__(self, size: NnxGPT2Size, layer: int, *, rngs: nnx.Rngs):
        self.heads, self.scale = size.heads, size.score_scale(layer)
        self.c_attn = TransposedProjection(size.dim, 3 * size.dim, std=size.std, rngs=rngs)
        self.c_proj = TransposedProjection(size.dim, size.dim, std=size.residual_std, rngs=rngs)
        self.attn_dropout = nnx.Dropout(size.attention_dropout, rngs=rngs)
        self.resid_dropout = nnx.Dropout(size.residual_dropout, rngs=rngs)

    def __call__(self, x: jax.Array, documents_BT: jax.Array | None = None) -> jax.Array:
        B, T, D = x.shape
        q, k, v = (part.reshape(B, T, self.heads, -1) for part in jnp.split(self.c_attn(x), 3, -1))
        out = attend(q, k, v, documents_BT, scale=self.scale, dropout=self.attn_dropout)
        return self.resid_dropout(self.c_proj(out.reshape(B, T, D)))


class NnxGPT2FeedForward(nnx.Module):
    def __init__(self, size: NnxGPT2Size, *, rngs: nnx.Rngs):
        self.activation = size.activation
        self.c_fc = TransposedProjection(size.dim, size.ffn, std=size.std, rngs=rngs)
        self.c_proj = TransposedProjection(size.ffn, size.dim, std=size.residual_std, rngs=rngs)
        self.dropout = nnx.Dropout(size.residual_dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.c_proj(ACTIVATIONS[self.activation](self.c_fc(x))))


class NnxGPT2Block(nnx.Module):
    def __init__(self, size: NnxGPT2Size, layer: int, *, rngs: nnx.Rngs):
        self.ln_1 = MeanNorm(size.dim, size.eps)
        self.attn = NnxGPT2Attention(size, layer, rngs=rngs)
        self.ln_2 = MeanNorm(size.dim, size.eps)
        self.mlp = NnxGPT2FeedForward(size, rngs=rngs)

    def __call__(self, x: jax.Array, documents_BT: jax.Array | None = None) -> jax.Array:
        x = x + self.attn(self.ln_1(x), documents_BT)
        return x + self.mlp(self.ln_2(x))


class NnxGPT2Decoder(nnx.Module):
    def __init__(self, size: NnxGPT2Size, *, rngs: nnx.Rngs):
        self.size = size
        self.wte = TokenEmbedding(size.vocab, size.dim, std=size.std, rngs=rngs)
        self.wpe = TokenEmbedding(size.sequence, size.dim, std=size.std, rngs=rngs)
        self.drop = nnx.Dropout(size.embedding_dropout, rngs=rngs)
        self.h = nnx.List([NnxGPT2Block(size, i, rngs=rngs) for i in range(size.layers)])
        self.ln_f = MeanNorm(size.dim, size.eps)

    def __call__(self, ids_BT: jax.Array, position_ids: jax.Array | None = None) -> jax.Array:
        refuse_too_long(ids_BT.shape[1], self.size.sequence)
        documents_BT = None if position_ids is None else document_numbers(position_ids)
        positions = jnp.arange(ids_BT.shape[1]) if position_ids is None else position_ids
        x = self.drop(self.wte(ids_BT) + self.wpe(positions))
        return self.ln_f(scan_layers(self.h, x, documents_BT))


class NnxGPT2(nnx.Module):
    """Token ids in, logits out; with `labels`, their summed loss; with `logits_at`, the logits of that position alone.

    A document begins where `position_ids` is 0; attention never crosses documents.
    """

    def __init__(self, size: NnxGPT2Size, *, rngs: nnx.Rngs):
        self.size = size
        self.transformer = NnxGPT2Decoder(size, rngs=rngs)
        self.lm_head = OutputHead(size.dim, size.vocab, std=size.std, rngs=rngs)
        if size.tied:
            self.lm_head.weight = self.transformer.wte.weight

    def __call__(
        self,
        ids_BT: jax.Array,
        labels: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> jax.Array:
        return self.lm_head(self.transformer(ids_BT, position_ids), labels=labels, at=logits_at)
