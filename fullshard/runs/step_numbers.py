"""The numbers of a run under way: those of a step by name, and those that a resumed run goes on with."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from fullshard.checkpoint.manifest import Manifest
from fullshard.engine.trainer import Step


class Flags(NamedTuple):
    """What all ranks hear of in the same step: that a signal came, that a checkpoint is due, that a save must end the run."""

    asked: bool
    due: bool
    troubled: bool


@dataclass(frozen=True)
class StepNumbers:
    """A step's numbers, off the device. `count`: what the loss was divided by."""

    loss: float
    grad_norm: float
    count: float
    skipped: bool
    flags: Flags
    metrics: dict[str, float]
    unit_norms: dict[str, float]

    @classmethod
    def of(cls, result: Step) -> Self:
        """Waits for the device."""
        numbers: Iterator[float] = iter(result.numbers())
        loss, norm, count, skipped = (next(numbers) for _ in range(4))
        flags = Flags(*(bool(next(numbers)) for _ in Flags._fields))
        metrics, norms = ({name: next(numbers) for name in names} for names in (result.metrics, result.unit_norms))
        return cls(loss, norm, count, bool(skipped), flags, metrics, norms)

    @property
    def finite(self) -> bool:
        return not self.skipped and math.isfinite(self.loss)


@dataclass
class Counts:
    """What a resumed run needs besides the state and the cursor. `rolled_from`, `rolled_to`: steps of the last rollback."""

    skips: int = 0
    skips_in_a_row: int = 0
    best: float = math.inf  # of the evaluations' losses
    since_best: int = 0
    rollbacks: int = 0
    rolled_from: int = -1
    rolled_to: int = -1

    def stored(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return asdict(self) | {"best": self.best if self.best < math.inf else None}

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Those of a checkpoint. Another program's may lack some."""
        extra = manifest.state.get("extra", {})
        return cls(**{name: extra[name] for name in asdict(cls()) if isinstance(extra.get(name), int | float)})

    def step(self, numbers: StepNumbers) -> None:
        self.skips += numbers.skipped
        self.skips_in_a_row = 0 if numbers.finite else self.skips_in_a_row + 1

    def evaluated(self, loss: float, min_delta: float) -> None:
        improved = loss < self.best - min_delta
        self.best, self.since_best = (loss, 0) if improved else (self.best, self.since_best + 1)
