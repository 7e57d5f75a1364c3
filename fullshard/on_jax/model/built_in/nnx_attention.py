"""The attention of the NNX models: causal, and within one document where positions restart at 0."""

import math

import jax
import jax.numpy as jnp
from flax import nnx


def document_numbers(position_ids_BT: jax.Array) -> jax.Array:
    """Which document of its row each token is of. A document begins where positions restart at 0."""
    return jnp.cumsum(position_ids_BT == 0, -1)


def attend(
    q_BTHD: jax.Array,
    k_BTHD: jax.Array,
    v_BTHD: jax.Array,
    documents_BT: jax.Array | None = None,
    *,
    scale: float | None = None,
    dropout: nnx.Dropout | None = None,
) -> jax.Array:
    """Causal attention: cuDNN's kernel on a GPU in half precision, XLA's otherwise. Keys and values may have fewer heads.

    `documents_BT`: a token sees its own document only. `scale`: of the scores, if not one over the root of the head's size.
    """
    same = None if documents_BT is None else documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
    if dropout is not None and dropout.rate and not dropout.deterministic:
        return _attend_and_drop(q_BTHD, k_BTHD, v_BTHD, same, scale, dropout)
    fused = jax.default_backend() == "gpu" and _fits_cudnn(q_BTHD, masked=same is not None)
    return jax.nn.dot_product_attention(
        q_BTHD, k_BTHD, v_BTHD, mask=same, is_causal=True, scale=scale, implementation="cudnn" if fused else "xla"
    )


def _fits_cudnn(q_BTHD: jax.Array, *, masked: bool) -> bool:
    """Whether cuDNN has a kernel for these queries."""
    _, T, _, D = q_BTHD.shape
    return q_BTHD.dtype in (jnp.bfloat16, jnp.float16) and D % 8 == 0 and D <= 128 and not (masked and T % 2)


def _attend_and_drop(
    q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, same: jax.Array | None, scale: float | None, dropout: nnx.Dropout
) -> jax.Array:
    """Attention with dropout of its weights, which neither kernel has. Holds all scores."""
    B, T, H, D = q_BTHD.shape
    q_BTKGD = q_BTHD.reshape(B, T, k_BTKD.shape[2], -1, D)  # G queries share a key
    scores = jnp.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BTKD, preferred_element_type=jnp.float32)
    scores = scores * (1 / math.sqrt(D) if scale is None else scale)
    seen = jnp.tril(jnp.ones((T, T), bool))
    if same is not None:
        seen = seen & same[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min)).astype(v_BTKD.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", dropout(weights), v_BTKD).reshape(B, T, H, D)
