"""Layers with torch's names and layouts: a weight is (out, in)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fullshard.on_jax.model.chunked_cross_entropy import chunked_cross_entropy

STD = 0.02  # of initial weights
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {  # by transformers' names
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


def normal(rngs: nnx.Rngs, *shape: int, std: float = STD) -> Any:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class Projection(nnx.Module):
    """A linear layer."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, std: float = STD, rngs: nnx.Rngs):
        self.weight = normal(rngs, outputs, inputs, std=std)
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.weight[...].T
        return y + self.bias[...] if hasattr(self, "bias") else y


class TransposedProjection(nnx.Module):
    """A linear layer whose weight is (in, out): transformers' Conv1D."""

    def __init__(self, inputs: int, outputs: int, *, std: float = STD, rngs: nnx.Rngs):
        self.weight, self.bias = normal(rngs, inputs, outputs, std=std), nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight[...] + self.bias[...]


class OutputHead(Projection):
    """The last layer of a language model: logits, or the summed loss of labels without ever holding all logits. `at`: compute
    those of this position alone."""

    def __call__(self, x: jax.Array, labels: jax.Array | None = None, at: jax.Array | None = None) -> jax.Array:
        x = x if at is None else jax.lax.dynamic_slice_in_dim(x, at, 1, 1)
        return super().__call__(x) if labels is None else chunked_cross_entropy(x, self.weight[...], labels)


class TokenEmbedding(nnx.Module):
    """A table of vectors. The vector of the token `padding` starts as zeros, and looking it up gives it no gradient."""

    def __init__(self, count: int, dim: int, *, padding: int | None = None, std: float = STD, rngs: nnx.Rngs):
        self.weight, self.padding = normal(rngs, count, dim, std=std), padding
        if padding is not None:
            self.weight[...] = self.weight[...].at[padding].set(0.0)

    def __call__(self, ids: jax.Array) -> jax.Array:
        found = self.weight[...][ids]
        return found if self.padding is None else jnp.where((ids == self.padding)[..., None], jax.lax.stop_gradient(found), found)


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
