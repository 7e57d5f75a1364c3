"""Optimizers as values: what to update with, without saying where. Each engine builds its own from them.

`decay_all = False` leaves parameters of one dim, norms and biases, without weight decay.
"""

from dataclasses import dataclass
from typing import Any

from fullshard.errors import FullshardError


@dataclass(frozen=True)
class Adam:
    """Adam with torch's defaults; the update runs in the plan's master dtype."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_all: bool = True

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay)
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise FullshardError(f"optimizer.betas must be two numbers from 0 to below 1, not {self.betas!r}")
        if not self.eps > 0:
            raise FullshardError(f"optimizer.eps must be above 0, not {self.eps!r}")


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    weight_decay: float = 0.01


@dataclass(frozen=True)
class SGD:
    """Gradient descent with optional momentum."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    decay_all: bool = True

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise FullshardError(f"optimizer.momentum must be from 0 to below 1, not {self.momentum!r}")
        if self.nesterov and not self.momentum:
            raise FullshardError("optimizer.nesterov has no effect without momentum; set momentum, or leave nesterov out")


@dataclass(frozen=True)
class TorchOptimizer:
    """Any optimizer of `torch.optim` that works element by element, by its name, with its own options."""

    name: str
    lr: float
    options: tuple[tuple[str, Any], ...] = ()
    decay_all: bool = True

    def __post_init__(self) -> None:
        _check(self.lr, 0.0)


Optimizer = Adam | AdamW | SGD | TorchOptimizer


def _check(lr: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise FullshardError(f"optimizer.{name} must be a number of at least 0, not {value!r}")
