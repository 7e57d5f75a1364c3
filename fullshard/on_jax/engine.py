"""The JAX engine behind `fullshard.engine.protocols.Engine`: its functions are this module's. Nothing else belongs here."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from flax import nnx

from fullshard.base.callables import is_callable_name, load_callable
from fullshard.base.errors import FullshardError, first_line, nearest
from fullshard.data.seeding import seeded
from fullshard.data.thread_loader import ThreadLoader
from fullshard.model.description import Description
from fullshard.on_jax.loss.losses import LossFunction, as_loss, called_loss, chunked_loss, summed_loss
from fullshard.on_jax.measuring.flops import flops_per_token, peak_flops
from fullshard.on_jax.measuring.jax_profiler import JaxProfiler
from fullshard.on_jax.measuring.measure import measure
from fullshard.on_jax.measuring.memory_analysis import memory
from fullshard.on_jax.model.describe import Factory
from fullshard.on_jax.model.describe import describe as describe_units
from fullshard.on_jax.model.layer_dtypes import refuse_other_dtypes
from fullshard.on_jax.model.model_call import accepts
from fullshard.on_jax.model.model_loading import (
    built,
    called,
    check_weights,
    classes_and_image_size,
    limits,
    load_model,
    parameter_shapes,
    scans,
    takes_positions,
)
from fullshard.on_jax.model.scanned_layers import executed, find_stacks
from fullshard.on_jax.optimizers.optax_optimizer import make_transformation
from fullshard.on_jax.parallelize.shard import refuse as refuse_plan
from fullshard.on_jax.parallelize.shard import shard as shard_model
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.ranks.jax_devices import all_devices, local_cluster, local_devices, out_of_memory
from fullshard.on_jax.ranks.processes import (
    CoordinatorMessages,
    all_or_none,
    data_share,
    finish,
    first_decides,
    is_first,
    lost_a_peer,
    processes_here,
    rank_and_world,
    start,
)
from fullshard.on_jax.saving.save import checkpointer
from fullshard.on_jax.saving.state_arrays import weights_of
from fullshard.on_jax.step.evaluate import evaluate
from fullshard.on_jax.step.generate import generate
from fullshard.on_jax.step.train_step import train_step
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import DType, Plan
from fullshard.ranks.hang_reports import HangReporter, innermost_line, main_thread_frame, stack_of

name = "jax"
forks = False
ONLY_TORCH = "use --engine torch"
NAMED_LOSSES: dict[str, LossFunction] = {"chunked": chunked_loss, "plain": summed_loss, "call": called_loss}

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


# -- ranks ---------------------------------------------------------------------------------------------------


def ranks_here() -> int:
    return processes_here()


def messages() -> CoordinatorMessages:
    return CoordinatorMessages()


def watched_ranks() -> HangReporter:
    return HangReporter(*rank_and_world(), CoordinatorMessages, _position)


def _position() -> dict[str, Any]:
    """Where this process's main thread is. Which collective it waits in, a compiled program does not tell."""
    stack = stack_of(main_thread_frame())
    waits = bool(stack) and "jax" in stack[-1].filename
    return {"waits": waits, "collective": None, "unit": None, "count": 0, "line": innermost_line(stack, "site-packages")}


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "flax", "optax")}


# -- the model -----------------------------------------------------------------------------------------------


def add_adapters(model: Factory, *, rank: int, alpha: int, dropout: float, targets: Sequence[str]) -> NoReturn:
    raise FullshardError(f"lora: the JAX engine trains whole models; {ONLY_TORCH}, or leave lora out")


def describe(
    model: Factory,
    *,
    classes: Sequence[str] = (),
    names: Sequence[str] = (),
    min_params: int = 0,
    experts: bool = False,
    small: int = 0,
    title: str = "",
    micro_batch: int = 0,
    sequence: int = 0,
    example: Any = None,
    loss: Any = None,
    compute: DType = "bf16",
    tensor: Sequence[int] = (),
    expert: Sequence[int] = (),
) -> Description:
    """The units of a model. What computing them costs is not traced here: presets ship it."""
    if experts or expert:
        raise FullshardError(f"experts as units: the JAX engine has no mixtures; {ONLY_TORCH}")
    if micro_batch or example is not None:
        raise FullshardError(
            f"on JAX the costs of presets alone are known, not those of {title or 'this model'}; name a strategy, as in "
            "plan.strategy = 'zero3'. A Hugging Face directory can be planned by `fullshard plan DIR --cluster C --engine jax`"
        )
    return describe_units(model, classes=classes, names=names, min_params=min_params, small=small, title=title)


def refuse(model: Factory, plan: Plan, optimizer: Optimizer | None = None, disk: str | Path | None = None) -> None:
    """Raise where JAX cannot carry the plan out with this optimizer."""
    refuse_plan(plan)
    refuse_other_dtypes(built(model), plan)
    if scans(model):
        executed(plan, find_stacks(built(model)))
    if optimizer is not None:
        make_transformation(optimizer)


def named_loss(name: str) -> LossFunction:
    """The loss that a recipe calls `plain` or `chunked`, or `file.py:callable`."""
    if name in NAMED_LOSSES:
        return NAMED_LOSSES[name]
    if is_callable_name(name):
        return load_callable(name, "on_jax.Loss")
    known = [n for n in NAMED_LOSSES if n != "call"]
    raise FullshardError(
        f"the JAX engine has no loss {name!r}; write {', '.join(known)} or file.py:callable{nearest(name, known)}"
    )


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


# -- the machine ---------------------------------------------------------------------------------------------


def disk_rates(directory: str | Path, nbytes: int, seconds: float) -> NoReturn:
    raise FullshardError(f"homes on disk: the JAX engine has none; {ONLY_TORCH}")


def host_share(state: JaxState, issued: float, quiet: float, looks: int) -> float:
    """1: a step is one call, whatever the host's pace."""
    return 1.0


# -- training ------------------------------------------------------------------------------------------------


def shard(
    model: Factory,
    plan: Plan,
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    weights: str | Path | None = None,
    disk: str | Path | None = None,
) -> JaxState:
    return shard_model(model, plan, optimizer, seed=seed, weights=weights)


def profiler(state: JaxState) -> JaxProfiler:
    return JaxProfiler(state)


def seed_dropout(state: JaxState, seed: int) -> None:
    """Nothing: `shard` has seeded the model's streams, of which every row of a batch has its own part."""


def loader(workers: int, prefetch: int, *, seed: int = 0, threads: bool = True) -> ThreadLoader:
    """Loads ahead in threads: a process that uses JAX must not fork."""
    return ThreadLoader(workers, prefetch, threads)


def collate(samples: Sequence[Any]) -> Any:
    """A tree of stacked arrays."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *samples)


if TYPE_CHECKING:  # mypy holds this module against the Protocol
    from fullshard.engine.protocols import Engine
    from fullshard.on_jax import engine

    _: Engine[Factory, JaxState] = engine
