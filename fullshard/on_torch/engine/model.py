"""Models of torch before they take memory, as `fullshard.engine.model.Models`."""

from pathlib import Path

from torch import nn

from fullshard.engine.model import ParameterFacts
from fullshard.on_torch.model.lora import add_adapters
from fullshard.on_torch.model.model_loading import load_model as load
from fullshard.on_torch.model.model_loading import model_facts as facts
from fullshard.on_torch.model.weights import Weights
from fullshard.on_torch.optimizers.sharded_optimizer import refuse_optimizer
from fullshard.on_torch.parallelize.refuse import refuse as refuse_plan
from fullshard.on_torch.tracing.describe import describe
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan

__all__ = ["add_adapters", "check_weights", "describe", "facts", "load", "parameters", "refuse", "scan", "trace_costs"]

scan = None
trace_costs = describe


def check_weights(model: nn.Module, directory: str | Path) -> None:
    """Raise where the directory's tensors are not the model's, by name and shape."""
    Weights(model, directory)


def parameters(model: nn.Module) -> list[ParameterFacts]:
    return [ParameterFacts(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]


def refuse(model: nn.Module, plan: Plan, optimizer: Optimizer | None = None, disk: str | Path | None = None) -> None:
    """Raise where torch cannot carry the plan out with this optimizer."""
    refuse_plan(model, plan, optimizer, disk)
    refuse_optimizer(optimizer)
