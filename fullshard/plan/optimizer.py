"""Optimizers as values. Each engine builds its own optimizer from them.

`decay_all = False`: no weight decay for parameters with one dim, which are norms and biases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from fullshard.base.errors import FullshardError, expect_number


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
        two = isinstance(self.betas, Sequence) and len(self.betas) == 2
        if not (two and all(isinstance(b, Real) and 0 <= b < 1 for b in self.betas)):
            raise FullshardError(f"optimizer.betas must be two numbers from 0 to below 1, not {self.betas!r}")
        expect_number("optimizer.eps", self.eps, zero=False)


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
        expect_number("optimizer.momentum", self.momentum)
        if not 0 <= self.momentum < 1:
            raise FullshardError(f"optimizer.momentum must be from 0 to below 1, not {self.momentum!r}")
        if self.nesterov and not self.momentum:
            raise FullshardError("optimizer.nesterov has no effect without momentum; set momentum, or leave nesterov out")


@dataclass(frozen=True)
class TorchOptimizer:
    """An optimizer of `torch.optim` by its name, with its own options. It must update element by element."""

    name: str
    lr: float
    options: tuple[tuple[str, Any], ...] = ()
    decay_all: bool = True

    def __post_init__(self) -> None:
        _check(self.lr, 0.0)
        if not isinstance(self.name, str):
            raise FullshardError(f"optimizer.name must be the name of one of torch.optim, such as 'RAdam', not {self.name!r}")
        for name, value in self.options:
            if isinstance(value, float) and not math.isfinite(value):
                raise FullshardError(f"optimizer.options.{name} must be finite, not {value!r}")


Optimizer = Adam | AdamW | SGD | TorchOptimizer


def _check(lr: float, weight_decay: float) -> None:
    expect_number("optimizer.lr", lr)
    expect_number("optimizer.weight_decay", weight_decay)
