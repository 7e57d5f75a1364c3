"""Models of JAX before they take memory, as `fullshard.engine.model.Models`."""

from collections.abc import Sequence
from pathlib import Path

from fullshard.base.errors import FullshardError
from fullshard.model.description import Description
from fullshard.on_jax.model.describe import Factory
from fullshard.on_jax.model.describe import describe as describe_units
from fullshard.on_jax.model.layer_dtypes import refuse_other_dtypes
from fullshard.on_jax.model.loading.model_loading import built, check_weights, parameters, scans
from fullshard.on_jax.model.loading.model_loading import load_model as load
from fullshard.on_jax.model.loading.model_loading import model_facts as facts
from fullshard.on_jax.model.loading.model_loading import scanned as scan
from fullshard.on_jax.model.scanned_layers import executed, find_stacks
from fullshard.on_jax.optimizers.optax_optimizer import make_transformation
from fullshard.on_jax.parallelize.shard import refuse as refuse_plan
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan

__all__ = ["add_adapters", "check_weights", "describe", "facts", "load", "parameters", "refuse", "scan", "trace_costs"]

add_adapters = None
trace_costs = None  # presets ship what computing them costs


def describe(
    model: Factory,
    *,
    classes: Sequence[str] = (),
    names: Sequence[str] = (),
    min_params: int = 0,
    experts: bool = False,
    title: str = "",
) -> Description:
    """The units of a model."""
    if experts:
        raise FullshardError("experts as units: the JAX engine has no mixtures; use --engine torch")
    return describe_units(model, classes=classes, names=names, min_params=min_params, title=title)


def refuse(model: Factory, plan: Plan, optimizer: Optimizer | None = None, disk: str | Path | None = None) -> None:
    """Raise where JAX cannot carry the plan out with this optimizer."""
    refuse_plan(plan)
    refuse_other_dtypes(built(model), plan)
    if scans(model):
        executed(plan, find_stacks(built(model)))
    if optimizer is not None:
        make_transformation(optimizer)
