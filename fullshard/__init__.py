"""fullshard: train models that do not fit.

How a model is sharded is a value, the `Plan`. Importing this package imports neither torch nor jax.
"""

from fullshard.cluster import Cluster
from fullshard.description import Description
from fullshard.errors import FullshardError
from fullshard.optimizer import SGD, Adam, AdamW, TorchOptimizer
from fullshard.plan import Batch, Home, Mesh, Plan, PlanError, Precision, Prefetch, Unit
from fullshard.strategies import ddp, hpz, hybrid, mixed, strategy, zero1, zero2, zero3
from fullshard.train.loop import train

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Batch",
    "Cluster",
    "Description",
    "FullshardError",
    "Home",
    "Mesh",
    "Plan",
    "PlanError",
    "Precision",
    "Prefetch",
    "TorchOptimizer",
    "Unit",
    "ddp",
    "hpz",
    "hybrid",
    "mixed",
    "strategy",
    "train",
    "zero1",
    "zero2",
    "zero3",
]
