"""Training on JAX, as `fullshard.engine.trainer.Trainer`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from fullshard.base.errors import FullshardError, first_line
from fullshard.data.seeding import seeded
from fullshard.data.thread_loader import ThreadLoader
from fullshard.engine.loss_value import find_loss
from fullshard.on_jax.loss.losses import LossFunction, as_loss, called_loss, chunked_loss, summed_loss
from fullshard.on_jax.model.describe import Factory
from fullshard.on_jax.model.loading.model_loading import built, called
from fullshard.on_jax.model.model_call import accepts
from fullshard.on_jax.parallelize.shard import shard as shard_model
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.step.evaluate import evaluate
from fullshard.on_jax.step.generate import generate
from fullshard.on_jax.step.train_step import train_step
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan

__all__ = [
    "collate",
    "evaluate",
    "generate",
    "loader",
    "named_loss",
    "refuse_batch",
    "refuse_loss",
    "seeded",
    "shard",
    "train_step",
]

NAMED_LOSSES: dict[str, LossFunction] = {"chunked": chunked_loss, "plain": summed_loss, "call": called_loss}


def shard(
    model: Factory,
    plan: Plan,
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    weights: str | Path | None = None,
    disk: str | Path | None = None,
) -> JaxState:
    """`disk`: None, since a plan with homes on disk is refused."""
    return shard_model(model, plan, optimizer, seed=seed, weights=weights)


def loader(workers: int, prefetch: int, *, seed: int = 0, threads: bool = True) -> ThreadLoader:
    """Loads ahead in threads: a process that uses JAX must not fork."""
    return ThreadLoader(workers, prefetch, threads)


def collate(samples: Sequence[Any]) -> Any:
    """A tree of stacked arrays."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *samples)


def named_loss(name: str) -> LossFunction:
    return find_loss(name, NAMED_LOSSES, "on_jax.Loss", "the JAX engine has no loss")


def refuse_loss(model: Factory, name: str) -> None:
    """Raise where the loss is not for the model."""
    if named_loss(name) is chunked_loss and not accepts(built(model), "labels"):
        raise FullshardError(
            "the loss is computed in chunks by default, which needs a model whose call takes labels and returns their loss; "
            "write train.loss = 'plain'"
        )


def refuse_batch(model: Factory, loss: LossFunction, batch: Any) -> None:
    """Raise where the model or the loss cannot be called with such a batch. Computes shapes alone."""
    graph, values = nnx.split(called(model))
    arrays = jax.tree.map(np.asarray, batch)

    def call(values: Any, batch: Any) -> Any:
        found = as_loss(loss(nnx.merge(graph, values), batch), batch)
        return found.sum, found.count, found.metrics

    try:
        jax.eval_shape(call, values, arrays)
    except FullshardError:
        raise
    except Exception as error:
        raise FullshardError(
            f"the model or its loss fails with a batch of the data ({type(error).__name__}: {first_line(error)}); look at its "
            "call, or write model.call = 'file.py:callable', a function (model, batch) -> logits"
        ) from error
