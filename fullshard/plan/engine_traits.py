"""What differs between the engines, as facts: a row each. Whatever depends on the engine asks its row, never its name.

Standard library only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fullshard.base.errors import FullshardError, nearest


@dataclass(frozen=True)
class EngineLimit:
    """Why an engine cannot do what a choice, a recipe or an option says. `refused`: which values; by default all but the
    choice's default. `idle`: the value would have no effect there, which the sentence says."""

    why: str
    fix: str = "leave it out"
    refused: Callable[[Any], bool] | None = None
    idle: bool = True

    def sentence(self, spelled: str, engine: str) -> str:
        return f"{spelled}{f' has no effect on {TRAITS[engine].word}' if self.idle else ''}: {self.why}; {self.fix}"


@dataclass(frozen=True)
class EngineTraits:
    """The facts of an engine. What its plans can hold, the table of choices says: `Choice.limits`."""

    word: str  # as sentences write it
    forks: bool  # a rank may fork, as worker processes that load data do
    one_process: bool  # one rank has all devices of a machine; otherwise each device has a rank
    one_program: bool  # a step is compiled and issued whole, whatever the plan says of compiling and gathering ahead
    traces: bool  # it finds out what a step of any model costs; otherwise the costs of presets alone are known
    predicted: bool  # the planner's kernels and allocator are its own
    weights_format: str  # of `checkpoint export`, for programs on the same framework
    limits: Mapping[str, EngineLimit] = field(default_factory=dict)  # of what is no choice of a plan: a recipe's key, an option


TRAITS = {
    "torch": EngineTraits(
        word="torch",
        forks=True,
        one_process=False,
        one_program=False,
        traces=True,
        predicted=True,
        weights_format="torch",
        limits={
            "model.scan": EngineLimit(
                "only the JAX engine compiles blocks as a loop", "leave it out, or use --engine jax", idle=False
            )
        },
    ),
    "jax": EngineTraits(
        word="JAX",
        forks=False,
        one_process=True,
        one_program=True,
        traces=False,
        predicted=False,
        weights_format="orbax",
        limits={
            "lora": EngineLimit("the JAX engine trains whole models", "use --engine torch, or leave lora out", idle=False),
            "--limit": EngineLimit(
                "JAX reserves a device's memory when it starts", "set XLA_PYTHON_CLIENT_MEM_FRACTION instead", idle=False
            ),
        },
    ),
}
ENGINES = tuple(TRAITS)
DEFAULT_ENGINE = "torch"


def refuse_engine(name: str) -> None:
    """Raise where there is no engine of this name."""
    if name not in TRAITS:
        raise FullshardError(f"there is no engine {name!r}; write {' or '.join(ENGINES)}{nearest(name, list(ENGINES))}")


def refuse_unoffered(engine: str, key: str, spelled: str = "") -> None:
    """Raise where the engine cannot do what the key asks for. `spelled`: as it was asked for."""
    if limit := TRAITS[engine].limits.get(key):
        raise FullshardError(limit.sentence(spelled or key, engine))
