"""The optimizers' update on flat tensors, by torch's fused kernels, on a CPU or a GPU.

`torch.optim` updates resident parameters with the same kernels. It cannot address pieces of flat memory.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullshard.base.errors import FullshardError
from fullshard.plan.optimizer import SGD, Adam, AdamW, Optimizer


@dataclass(frozen=True)
class Rule:
    """An optimizer's kind, and torch's names of its moments (`keys`)."""

    kind: str
    keys: tuple[str, ...]

    @property
    def slots(self) -> int:
        return len(self.keys)


def rule_of(spec: Optimizer) -> Rule:
    if isinstance(spec, AdamW):
        return Rule("adamw", ("exp_avg", "exp_avg_sq"))
    if isinstance(spec, Adam):
        return Rule("adam", ("exp_avg", "exp_avg_sq"))
    if isinstance(spec, SGD):
        return Rule("sgd", ("momentum_buffer",) if spec.momentum else ())
    raise FullshardError(
        f"optimizer {spec.name!r} keeps its state on the device only; use AdamW, Adam or SGD where home.optimizer or "
        "home.params is not 'device'"
    )


def apply_rule(rule: Rule, master: Tensor, gradient: Tensor, moments: list[Tensor], step: int, group: dict[str, Any]) -> None:
    """Update `master` and `moments` in place. `step`: the number of this update, from 1. `group`: as torch's optimizers'."""
    if rule.kind == "sgd":
        torch._fused_sgd_(
            [master],
            [gradient],
            moments,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=False,  # the buffer starts from zeros, with the same result
        )
        return
    fused = torch._fused_adamw_ if rule.kind == "adamw" else torch._fused_adam_
    fused(
        [master],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [torch.full((), float(step), dtype=torch.float32, device=master.device)],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
