"""A case: what a seed means. Values only."""

from dataclasses import dataclass, field
from typing import Any

from fullshard.plan.plan import Home
from tests.fuzz.orders.toy import Shape


@dataclass(frozen=True)
class Action:
    """`name` of a function of `actions`, what it is called with, and how the state is read afterwards, if it is. `index`: where
    it stood when the case was drawn, for its data."""

    index: int
    name: str
    choices: dict[str, Any] = field(default_factory=dict)
    look: str | None = None

    def __str__(self) -> str:
        choices = ", ".join(f"{k}={v}" for k, v in self.choices.items())
        return f"{self.index}: {self.name}({choices})" + (f", then read by {self.look}" if self.look else "")


@dataclass(frozen=True)
class PlanChoice:
    """What a plan is made of. `homes`: of the units in turn."""

    strategy: str
    homes: tuple[Home, ...] = (Home(),)
    activations: str = "device"
    remat: str = "none"
    tensor: int = 1
    accumulate: int = 1
    sync: str = "every"
    prefetch: int = 1
    share: float | None = None
    backlog: int | None = None

    def __str__(self) -> str:
        given = [f"{k}={v}" for k, v in vars(self).items() if v != PlanChoice.__dict__.get(k) and k not in ("strategy", "homes")]
        return " ".join([self.strategy, "homes=" + ",".join(map(str, self.homes)), *given])


@dataclass(frozen=True)
class Leg:
    """Actions on one set of ranks, that begin with a new state. The next leg goes on from this one's checkpoint."""

    world: int
    plan: PlanChoice
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Case:
    """`attached`: the optimizer is one of the caller's own, that the state gets after it is made."""

    seed: int
    shape: Shape
    optimizer: Any
    compute: str
    checks: bool
    attached: bool
    legs: tuple[Leg, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.shape}; {self.optimizer}; compute {self.compute}"]
        lines[0] += f", checks={self.checks}, attached={self.attached}"
        for leg in self.legs:
            lines += [f"  {leg.world} ranks: {leg.plan}", *(f"    {a}" for a in leg.actions)]
        return "\n".join(lines)
