"""What torch's optimizer says of offloaded parameters: the settings of their groups, and the state that it shows."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit
from fullshard.on_torch.optimizers.sharded_optimizer import group_settings


class OptimizerGroups:
    """The optimizer's groups, read once a step. Without an optimizer there are none."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, units: list[OffloadedUnit]):
        # The optimizer's hooks keep the offloaded units' optimizer alive: see *Nothing refers back* in `tiered_optimizer`.
        self._optimizer = weakref.ref(optimizer) if optimizer else lambda: None
        self.settings: list[dict[str, Any]] = []  # in this step
        order = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]} if optimizer else {}
        for unit in units:
            unit.settings = [order[id(p)] for p in unit.params[: unit.trained]]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._optimizer()

    def read(self) -> None:
        """Take the settings as they are now."""
        groups = group_settings(self.optimizer) if self.optimizer else []
        number = lambda v: v.item() if isinstance(v, Tensor) else v  # some schedulers keep theirs in tensors
        self.settings = [{k: number(v) for k, v in g.items()} for g in groups]

    def of(self, unit: OffloadedUnit) -> list[dict[str, Any]]:
        """The settings of this step, by trained parameter."""
        return [self.settings[i] for i in unit.settings]

    def state_of(self, p: nn.Parameter) -> dict[str, Any]:
        """What the optimizer shows as the parameter's state."""
        return self.optimizer.state[p] if self.optimizer else {}

    def publish_steps(self, unit: OffloadedUnit) -> None:
        """Show how often each parameter was updated."""
        for p, step in zip(unit.params, unit.steps, strict=False):
            self.state_of(p)["step"] = torch.tensor(float(step))
