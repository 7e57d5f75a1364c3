"""Sampling from a sharded model. A forward is a collective: every process calls it with the same prompt."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fullshard.base.errors import FullshardError, expect_number
from fullshard.on_jax.model.model_call import logits_at

SHORTEST = 16  # tokens of the compiled forward
MOST = 2**31 - 1  # tokens are 32 bits on the device


def generate(
    model: nnx.Module,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    stop: int | None = None,
    seed: int = 0,
    window: int | None = None,
) -> list[int]:
    """Continue `prompt`. Returns the prompt and the new tokens.

    `temperature` 0 takes the most likely token. `stop` is a token that ends the sample. `window` limits the context to that
    many tokens. One forward of a fixed length is compiled for all tokens, and kept for later calls. Collective.
    """
    size = getattr(model, "size", None)
    _refuse(prompt, max_new_tokens, temperature, window, getattr(size, "vocab", None))
    graph, values = nnx.split(model)
    length = _padded_length(len(prompt) + max_new_tokens - 1, window, getattr(size, "sequence", None))
    tokens = list(prompt)
    for index in range(max_new_tokens):
        context = tokens[-length:]
        ids_BT = np.zeros((1, length), np.int32)
        ids_BT[0, : len(context)] = context
        found = _next_token(graph, values, ids_BT, len(context) - 1, np.float32(temperature), np.uint32(seed % 2**32), index)
        tokens.append(int(found))
        if tokens[-1] == stop:
            break
    return tokens


@functools.partial(jax.jit, static_argnums=0)
def _next_token(
    graph: Any, values: Any, ids_BT: jax.Array, last: jax.Array, temperature: jax.Array, seed: jax.Array, index: jax.Array
) -> jax.Array:
    """The token after position `last`. What stands behind it is padding, which causal attention does not see."""
    model = nnx.merge(graph, values)
    model.eval()
    logits_V = logits_at(model, ids_BT, last)[0].astype(jnp.float32)
    key = jax.random.fold_in(jax.random.key(seed), index)
    drawn = jax.random.categorical(key, logits_V / jnp.where(temperature > 0, temperature, 1.0))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V))


def _padded_length(needed: int, window: int | None, longest: int | None) -> int:
    """The tokens of a forward: a power of two, so that few lengths are compiled, but no more than window and model have."""
    length = max(SHORTEST, 1 << max(needed - 1, 0).bit_length())
    if longest is not None and longest >= needed:
        length = min(length, longest)
    return length if window is None else min(length, window)


def _refuse(prompt: Sequence[int], count: int, temperature: float, window: int | None, vocabulary: int | None) -> None:
    if not len(prompt):
        raise FullshardError("generate needs a prompt of at least one token; start with a newline or the tokenizer's first token")
    most = MOST if vocabulary is None else vocabulary - 1
    if wrong := [t for t in prompt if not 0 <= t <= most]:
        raise FullshardError(f"generate: the prompt has token {wrong[0]}; the model's tokens are 0 to {most}")
    expect_number("generate: temperature", temperature)
    for name, value, least in (("max_new_tokens", count, 0), ("window", window, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise FullshardError(f"generate: {name} must be a whole number of at least {least}, not {value!r}")
