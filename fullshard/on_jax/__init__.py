"""The JAX engine: carries a plan out on Flax NNX models, by shardings alone."""

from fullshard.on_jax.describe import describe
from fullshard.on_jax.generate import generate
from fullshard.on_jax.jax_state import JaxState
from fullshard.on_jax.losses import Loss, called_loss, chunked_loss, cross_entropy, summed_loss
from fullshard.on_jax.model_loading import NnxFactory, load_model
from fullshard.on_jax.shard import shard
from fullshard.on_jax.step import JaxStep, compilations, lowered_step, train_step

__all__ = [
    "JaxState",
    "JaxStep",
    "Loss",
    "NnxFactory",
    "called_loss",
    "chunked_loss",
    "compilations",
    "cross_entropy",
    "describe",
    "generate",
    "load_model",
    "lowered_step",
    "shard",
    "summed_loss",
    "train_step",
]
