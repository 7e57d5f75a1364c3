"""Optimizers as values: what to update with, without saying where. Each engine builds its own from them."""

from dataclasses import dataclass

from fullshard.errors import FullshardError


@dataclass(frozen=True)
class Adam:
    """Adam with torch's defaults; the update runs in the plan's master dtype."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay)


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

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay)


Optimizer = Adam | AdamW | SGD


def _check(lr: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not isinstance(value, int | float) or not value >= 0:
            raise FullshardError(f"optimizer.{name} must be a number of at least 0, not {value!r}")
