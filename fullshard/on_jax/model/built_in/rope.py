"""Rotary position embedding, and the ways of scaling its frequencies that transformers calls `rope_type`."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True)
class RopeScaling:
    """How a model was made for longer texts than those of its training. The fields are those of transformers'
    `rope_parameters`; each kind reads its own."""

    kind: RopeKind = "default"
    factor: float = 1.0
    original_length: int = 0  # original_max_position_embeddings
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    cos_sin_factor: float = 1.0  # attention_factor


UNSCALED = RopeScaling()


def rotary(positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling) -> tuple[jax.Array, jax.Array]:
    """The cosine and sine of every position and frequency."""
    angles = positions.astype(jnp.float32)[..., None] * frequencies(head_dim, theta, scaling)
    cos, sin = jnp.cos(angles) * scaling.cos_sin_factor, jnp.sin(angles) * scaling.cos_sin_factor
    return cos[..., None, :], sin[..., None, :]


def rotate(x_BTHD: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply rotary position embedding, pairing the first half of a head with the second."""
    a, b = jnp.split(x_BTHD.astype(jnp.float32), 2, -1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(x_BTHD.dtype)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Radians per position, by pair of elements. Computed by NumPy, so that they are the same on every device."""
    plain = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    match scaling.kind:
        case "linear":
            return plain / scaling.factor
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, head_dim, theta, scaling)
    return plain


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long waves are stretched by the factor, short ones kept, those between interpolated."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    length = 2 * math.pi / plain
    smooth = (scaling.original_length / length - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    long, short = length > scaling.original_length / low, length < scaling.original_length / high
    return np.where(long, plain / scaling.factor, np.where(short, plain, between)).astype(np.float32)


def _yarn(plain: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """As the paper has it: pairs that turn often keep their frequency, those that turn seldom are stretched by the factor."""

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(scaling.original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # no division by 0
    stretched = np.clip((np.arange(len(plain), dtype=np.float32) - first) / (last - first), 0, 1)
    return (plain / scaling.factor * stretched + plain * (1 - stretched)).astype(np.float32)


def yarn_cos_sin_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What yarn multiplies cosines and sines by, unless a config says it."""
    grown = lambda m: 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)
