"""The cross-entropy of a head by parts of the tokens, so that all logits never exist at once."""

import jax
import jax.numpy as jnp

IGNORED = -100

BUDGET = 1 << 30  # bytes of fp32 logits of a chunk, on each device


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Summed over the labels that are not -100."""
    counted = labels != IGNORED
    right = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[..., None], -1)[..., 0]
    return jnp.where(counted, jax.nn.logsumexp(logits, -1) - right, 0.0).sum()


def chunked_cross_entropy(hidden_BTD: jax.Array, weight_VD: jax.Array, labels_BT: jax.Array) -> jax.Array:
    """The summed loss of logits `hidden @ weight.T`, computed for a part of the tokens at a time, in backward again."""
    B, T = labels_BT.shape
    wanted = -(-B * T * len(weight_VD) * 4 // (BUDGET * jax.device_count()))
    chunks = next(n for n in range(wanted, T + 1) if T % n == 0) if wanted < T else T

    @jax.checkpoint
    def part(hidden: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy((hidden @ weight_VD.T).astype(jnp.float32), labels)

    parts = zip(jnp.split(hidden_BTD, chunks, 1), jnp.split(labels_BT, chunks, 1), strict=True)
    return jnp.stack([part(h, y) for h, y in parts]).sum()
