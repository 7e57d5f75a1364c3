"""Layers with torch's names and layouts: a weight is (out, in)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.on_jax.losses import chunked_cross_entropy

STD = 0.02  # of initial weights


def normal(rngs: nnx.Rngs, *shape: int) -> Any:
    return nnx.Param(STD * jax.random.normal(rngs.params(), shape, jnp.float32))


class Projection(nnx.Module):
    """A linear layer."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, rngs: nnx.Rngs):
        self.weight = normal(rngs, outputs, inputs)
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.weight[...].T
        return y + self.bias[...] if hasattr(self, "bias") else y


class OutputHead(Projection):
    """The last layer of a language model: logits, or the summed loss of labels without ever holding all logits."""

    def __call__(self, x: jax.Array, labels: jax.Array | None = None) -> jax.Array:
        return super().__call__(x) if labels is None else chunked_cross_entropy(x, self.weight[...], labels)


class TokenEmbedding(nnx.Module):
    """A table of vectors."""

    def __init__(self, count: int, dim: int, *, rngs: nnx.Rngs):
        self.weight = normal(rngs, count, dim)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.weight[...][ids]


class RootMeanSquareNorm(nnx.Module):
    """RMSNorm, in fp32."""

    def __init__(self, dim: int, eps: float):
        self.weight, self.eps = nnx.Param(jnp.ones(dim)), eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class MeanNorm(nnx.Module):
    """LayerNorm, in fp32."""

    def __init__(self, dim: int, eps: float = 1e-5):
        self.weight, self.bias, self.eps = nnx.Param(jnp.ones(dim)), nnx.Param(jnp.zeros(dim)), eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


def attend(q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
    """Causal attention: cuDNN's kernel on a GPU in half precision, XLA's otherwise."""
    fused = jax.default_backend() == "gpu" and q_BTHD.dtype in (jnp.bfloat16, jnp.float16)
    return jax.nn.dot_product_attention(q_BTHD, k_BTHD, v_BTHD, is_causal=True, implementation="cudnn" if fused else "xla")
