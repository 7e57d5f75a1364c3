"""Training on torch, as `fullshard.engine.trainer.Trainer`."""

from pathlib import Path

from torch import nn

from fullshard.base.errors import FullshardError
from fullshard.engine.loss_value import find_loss
from fullshard.on_torch.loss.batch_checks import objective_fault
from fullshard.on_torch.loss.chunked_loss import chunked_loss
from fullshard.on_torch.loss.losses import LossFunction, called_loss, summed_loss
from fullshard.on_torch.loss.objective_losses import LOSSES
from fullshard.on_torch.parallelize.shard import shard as shard_model
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.step.batch_loader import collate, loader, seeded
from fullshard.on_torch.step.dropout_seed import seed_dropout
from fullshard.on_torch.step.generate import generate
from fullshard.on_torch.step.train_step import evaluate, train_step
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

NAMED_LOSSES: dict[str, LossFunction] = LOSSES | {"chunked": chunked_loss, "plain": summed_loss, "call": called_loss}
refuse_batch = None  # `load_model` has looked at how the model is called, and the first step checks the rest


def shard(
    model: nn.Module,
    plan: Plan,
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    weights: str | Path | None = None,
    disk: str | Path | None = None,
) -> State:
    state = shard_model(model, plan, optimizer, seed=seed, weights=weights, disk=disk)
    seed_dropout(state, seed)
    return state


def named_loss(name: str) -> LossFunction:
    return find_loss(name, NAMED_LOSSES, "on_torch.Loss", "there is no loss")


def refuse_loss(model: nn.Module, name: str) -> None:
    """Raise where the loss is not for the model."""
    if fault := objective_fault(model, named_loss(name)):
        raise FullshardError(fault)
