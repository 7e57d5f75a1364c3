"""fullshard: train models that do not fit.

How a model is sharded is a value, the `Plan`. Importing this package imports neither torch nor jax.
"""

from typing import TYPE_CHECKING, Any

from fullshard.base.errors import FullshardError
from fullshard.cluster.topology import Cluster
from fullshard.model import presets
from fullshard.model.description import Description
from fullshard.plan.optimizer import SGD, Adam, AdamW, TorchOptimizer
from fullshard.plan.plan import Batch, Home, Kernels, Mesh, Plan, PlanError, Precision, Prefetch, Unit, Wire
from fullshard.planner.estimate import Estimate, estimate
from fullshard.planner.search.search import find_plan
from fullshard.planner.search.staging_slots import tune_updates
from fullshard.planner.strategies import ddp, hpz, hybrid, mixed, strategy, zero1, zero2, zero3
from fullshard.runs.train_loop import train

if TYPE_CHECKING:
    from fullshard import checkpoint as checkpoint

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`fullshard.checkpoint`, when it is first asked for: it needs numpy, which `fullshard plan` does not."""
    if name != "checkpoint":
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    import importlib

    return importlib.import_module("fullshard.checkpoint")


__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Batch",
    "Cluster",
    "Description",
    "Estimate",
    "FullshardError",
    "Home",
    "Kernels",
    "Mesh",
    "Plan",
    "PlanError",
    "Precision",
    "Prefetch",
    "TorchOptimizer",
    "Unit",
    "Wire",
    "ddp",
    "estimate",
    "find_plan",
    "hpz",
    "hybrid",
    "mixed",
    "presets",
    "strategy",
    "train",
    "tune_updates",
    "zero1",
    "zero2",
    "zero3",
]
