"""The JAX engine: carries a plan out on Flax NNX models, by shardings alone. What does the same as in `on_torch` has its name."""

from fullshard.on_jax.loss.losses import Loss, called_loss, chunked_loss, summed_loss
from fullshard.on_jax.measuring.measure import measure
from fullshard.on_jax.measuring.memory_analysis import StepMemory, memory, memory_analysis
from fullshard.on_jax.model.chunked_cross_entropy import chunked_cross_entropy, cross_entropy
from fullshard.on_jax.model.describe import Factory, describe
from fullshard.on_jax.model.loading.model_loading import NnxFactory, load_model
from fullshard.on_jax.model.scanned_layers import scan_layers
from fullshard.on_jax.parallelize.shard import shard
from fullshard.on_jax.parallelize.state import JaxState as State
from fullshard.on_jax.ranks.processes import finish, is_first, start
from fullshard.on_jax.saving.save import JaxCheckpointer as Checkpointer
from fullshard.on_jax.step.compiled_collectives import CollectiveCheck
from fullshard.on_jax.step.evaluate import evaluate
from fullshard.on_jax.step.generate import generate
from fullshard.on_jax.step.train_step import JaxStep as StepResult
from fullshard.on_jax.step.train_step import check_collectives, compilations, lowered_step, train_step

__all__ = [
    "Checkpointer",
    "CollectiveCheck",
    "Factory",
    "Loss",
    "NnxFactory",
    "State",
    "StepMemory",
    "StepResult",
    "called_loss",
    "check_collectives",
    "chunked_cross_entropy",
    "chunked_loss",
    "compilations",
    "cross_entropy",
    "describe",
    "evaluate",
    "finish",
    "generate",
    "is_first",
    "load_model",
    "lowered_step",
    "measure",
    "memory",
    "memory_analysis",
    "scan_layers",
    "shard",
    "start",
    "summed_loss",
    "train_step",
]
