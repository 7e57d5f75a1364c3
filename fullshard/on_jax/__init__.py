"""The JAX engine: carries a plan out on Flax NNX models, by shardings alone."""

from fullshard.on_jax import saving as saving
from fullshard.on_jax.loss.losses import Loss, called_loss, chunked_loss, summed_loss
from fullshard.on_jax.measuring.memory_analysis import StepMemory, memory_analysis
from fullshard.on_jax.model.chunked_cross_entropy import cross_entropy
from fullshard.on_jax.model.describe import Factory, describe
from fullshard.on_jax.model.model_loading import NnxFactory, load_model
from fullshard.on_jax.model.scanned_layers import scan_layers
from fullshard.on_jax.parallelize.shard import shard
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.step.compiled_collectives import CollectiveCheck
from fullshard.on_jax.step.generate import generate
from fullshard.on_jax.step.train_step import JaxStep, check_collectives, compilations, lowered_step, train_step

__all__ = [
    "CollectiveCheck",
    "Factory",
    "JaxState",
    "JaxStep",
    "Loss",
    "NnxFactory",
    "StepMemory",
    "called_loss",
    "check_collectives",
    "chunked_loss",
    "compilations",
    "cross_entropy",
    "describe",
    "generate",
    "load_model",
    "lowered_step",
    "memory_analysis",
    "scan_layers",
    "shard",
    "summed_loss",
    "train_step",
]
