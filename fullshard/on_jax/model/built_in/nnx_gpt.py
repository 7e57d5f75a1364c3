"""A plain GPT on NNX: learned positions, LayerNorm, GELU. Names and layouts are those of `on_torch`'s GPT."""

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.base.errors import FullshardError
from fullshard.model.presets import GPTSize
from fullshard.on_jax.model.built_in.layers import MeanNorm, OutputHead, Projection, TokenEmbedding
from fullshard.on_jax.model.built_in.nnx_attention import attend, document_numbers
from fullshard.on_jax.model.scanned_layers import scan_layers


class NnxGPTAttention(nnx.Module):
    def __init__(self, size: GPTSize, *, rngs: nnx.Rngs):
        self.heads = size.heads
        self.wq = Projection(size.dim, size.dim, bias=size.bias, rngs=rngs)
        self.wk = Projection(size.dim, size.dim, bias=size.bias, rngs=rngs)
        self.wv = Projection(size.dim, size.dim, bias=size.bias, rngs=rngs)
        self.wo = Projection(size.dim, size.dim, bias=size.bias, rngs=rngs)
        self.dropout = nnx.Dropout(size.dropout, rngs=rngs) if size.dropout else None

    def __call__(self, x: jax.Array, documents_BT: jax.Array | None = None) -> jax.Array:
        B, T, D = x.shape
        q, k, v = (proj(x).reshape(B, T, -1, D // self.heads) for proj in (self.wq, self.wk, self.wv))
        return self.wo(attend(q, k, v, documents_BT, dropout=self.dropout).reshape(B, T, -1))


class NnxGPTFeedForward(nnx.Module):
    def __init__(self, size: GPTSize, *, rngs: nnx.Rngs):
        self.w1 = Projection(size.dim, size.ffn, bias=True, rngs=rngs)
        self.w2 = Projection(size.ffn, size.dim, bias=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w2(jax.nn.gelu(self.w1(x), approximate=False))


class NnxGPTBlock(nnx.Module):
    def __init__(self, size: GPTSize, *, rngs: nnx.Rngs):
        self.attention_norm = MeanNorm(size.dim)
        self.attention = NnxGPTAttention(size, rngs=rngs)
        self.ffn_norm = MeanNorm(size.dim)
        self.feed_forward = NnxGPTFeedForward(size, rngs=rngs)
        self.dropout = nnx.Dropout(size.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, documents_BT: jax.Array | None = None) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x), documents_BT))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class NnxGPT(nnx.Module):
    """Token ids in, logits out; with `labels`, their summed loss; with `logits_at`, the logits of that position alone.

    A document begins where `position_ids` is 0; attention never crosses documents.
    """

    def __init__(self, size: GPTSize, *, rngs: nnx.Rngs):
        self.size = size
        self.tok_embeddings = TokenEmbedding(size.vocab, size.dim, rngs=rngs)
        self.pos_embeddings = TokenEmbedding(size.sequence, size.dim, rngs=rngs)
        self.dropout = nnx.Dropout(size.dropout, rngs=rngs)
        self.layers = nnx.List([NnxGPTBlock(size, rngs=rngs) for _ in range(size.layers)])
        self.norm = MeanNorm(size.dim)
        self.output = OutputHead(size.dim, size.vocab, rngs=rngs)
        if size.tied:
            self.output.weight = self.tok_embeddings.weight

    def __call__(
        self,
        ids_BT: jax.Array,
        labels: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> jax.Array:
        refuse_too_long(ids_BT.shape[1], self.size.sequence)
        documents_BT = None if position_ids is None else document_numbers(position_ids)
        positions = jnp.arange(ids_BT.shape[1]) if position_ids is None else position_ids
        x = self.dropout(self.tok_embeddings(ids_BT) + self.pos_embeddings(positions))
        x = self.norm(scan_layers(self.layers, x, documents_BT))
        return self.output(x, labels=labels, at=logits_at)


def refuse_too_long(tokens: int, positions: int) -> None:
    """Raise where a model with learned positions has none for a token: JAX would take the last one."""
    if tokens > positions:
        raise FullshardError(f"{tokens} tokens in a row, but the model has {positions} positions; write at most {positions}")
