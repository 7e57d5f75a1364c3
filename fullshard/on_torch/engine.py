"""The torch engine behind `fullshard.engine.protocols.Engine`: its functions are this module's. Nothing else belongs here."""

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.base.callables import is_callable_name, load_callable
from fullshard.base.errors import FullshardError, nearest
from fullshard.checkpoint.retention import Retention
from fullshard.on_torch.loss.batch_checks import objective_fault
from fullshard.on_torch.loss.chunked_loss import chunked_loss
from fullshard.on_torch.loss.losses import LossFunction, called_loss, summed_loss
from fullshard.on_torch.loss.objective_losses import LOSSES
from fullshard.on_torch.measuring import host_time
from fullshard.on_torch.measuring.flops import flops_per_token, peak_flops
from fullshard.on_torch.measuring.measure import disk_rates_together as disk_rates
from fullshard.on_torch.measuring.measure import measure
from fullshard.on_torch.measuring.torch_profiler import TorchProfiler
from fullshard.on_torch.model.lora import add_adapters
from fullshard.on_torch.model.model_loading import classes_and_image_size, limits, takes_positions
from fullshard.on_torch.model.model_loading import load_model as build_model
from fullshard.on_torch.model.weights import Weights
from fullshard.on_torch.optimizers.sharded_optimizer import refuse_optimizer
from fullshard.on_torch.parallelize.refuse import refuse as refuse_plan
from fullshard.on_torch.parallelize.shard import shard
from fullshard.on_torch.parallelize.state import State, memory
from fullshard.on_torch.ranks.device_meshes import (
    all_devices,
    data_share,
    finish,
    is_first,
    local_devices,
    rank_and_world,
    ranks_here,
    start,
)
from fullshard.on_torch.ranks.device_presets import local_cluster
from fullshard.on_torch.ranks.first_failure import lost_a_peer
from fullshard.on_torch.ranks.hang_position import main_thread_position
from fullshard.on_torch.ranks.rank_agreement import all_or_none, first_decides
from fullshard.on_torch.ranks.store_messages import StoreClient
from fullshard.on_torch.saving.save import Checkpointer
from fullshard.on_torch.saving.state_tensors import weights_of
from fullshard.on_torch.step.batch_loader import collate, loader, seeded
from fullshard.on_torch.step.dropout_seed import seed_dropout
from fullshard.on_torch.step.generate import generate
from fullshard.on_torch.step.train_step import evaluate, train_step
from fullshard.on_torch.tracing.describe import describe
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan
from fullshard.ranks.hang_reports import HangReporter

name = "torch"
forks = True
NAMED_LOSSES: dict[str, LossFunction] = LOSSES | {"chunked": chunked_loss, "plain": summed_loss, "call": called_loss}

__all__ = [
    "add_adapters",
    "all_devices",
    "all_or_none",
    "check_weights",
    "checkpointer",
    "classes_and_image_size",
    "collate",
    "data_share",
    "describe",
    "disk_rates",
    "evaluate",
    "finish",
    "first_decides",
    "flops_per_token",
    "forks",
    "generate",
    "host_share",
    "is_first",
    "limits",
    "load_model",
    "loader",
    "local_cluster",
    "local_devices",
    "lost_a_peer",
    "measure",
    "memory",
    "messages",
    "name",
    "named_loss",
    "out_of_memory",
    "parameter_shapes",
    "peak_flops",
    "profiler",
    "rank_and_world",
    "ranks_here",
    "refuse",
    "refuse_batch",
    "refuse_loss",
    "seed_dropout",
    "seeded",
    "shard",
    "start",
    "takes_positions",
    "train_step",
    "versions",
    "watched_ranks",
    "weights_of",
]


def messages() -> StoreClient:
    return StoreClient()


def watched_ranks() -> HangReporter:
    return HangReporter(*rank_and_world(), StoreClient, main_thread_position)


def versions() -> dict[str, str]:
    return {"torch": version("torch")}


def load_model(name: str, *, init: str = "factory", call: str | None = None, scan: bool = False) -> nn.Module:
    if scan:
        raise FullshardError(
            "model.scan = true: only the JAX engine compiles blocks as a loop; leave it out, or use --engine jax"
        )
    return build_model(name, init=init, call=call)


def check_weights(model: nn.Module, directory: str | Path) -> None:
    """Raise where the directory's tensors are not the model's, by name and shape."""
    Weights(model, directory)


def parameter_shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...], str, bool]]:
    return [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]


def refuse(model: nn.Module, plan: Plan, optimizer: Optimizer | None = None, disk: str | Path | None = None) -> None:
    """Raise where torch cannot carry the plan out with this optimizer."""
    refuse_plan(model, plan, optimizer, disk)
    refuse_optimizer(optimizer)


def host_share(state: State, issued: float, quiet: float, looks: int) -> float:
    return host_time.host_share(issued, quiet, state.device, looks=looks)


def named_loss(name: str) -> LossFunction:
    """The loss that a recipe calls `plain` or `chunked`, the one of an objective, `file.py:callable`, or `call`: the one of the
    model's own call."""
    if name in NAMED_LOSSES:
        return NAMED_LOSSES[name]
    if is_callable_name(name):
        return load_callable(name, "on_torch.Loss")
    known = [n for n in NAMED_LOSSES if n != "call"]
    raise FullshardError(f"there is no loss {name!r}; write {', '.join(known)} or file.py:callable{nearest(name, known)}")


def refuse_loss(model: nn.Module, name: str) -> None:
    """Raise where the loss is not for the model."""
    if fault := objective_fault(model, named_loss(name)):
        raise FullshardError(fault)


def refuse_batch(model: nn.Module, loss: LossFunction, batch: Any) -> None:
    """Nothing: `load_model` has looked at how the model is called, and the first step checks the rest."""


def profiler(state: State) -> TorchProfiler:
    return TorchProfiler(state)


def out_of_memory(error: BaseException) -> bool:
    """The CPU's allocator has no exception of its own."""
    refused = isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
    return refused or isinstance(error, torch.OutOfMemoryError | MemoryError)


def checkpointer(checkpoint_dir: str | Path, state: State, *, keep: Retention | None, overlap: bool, run: str) -> Checkpointer:
    return Checkpointer(checkpoint_dir, state, keep=keep, overlap=overlap, run=run)


if TYPE_CHECKING:  # mypy holds this module against the Protocol
    from fullshard.engine.protocols import Engine
    from fullshard.on_torch import engine

    _: Engine[nn.Module, State] = engine
