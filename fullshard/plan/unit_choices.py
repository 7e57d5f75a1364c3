"""The choices of single units, a row each: layout, reshard, remat and homes; what strategies make them from; and how the tensor
axis splits modules. Standard library only.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from fullshard.plan.choice import Part, PlanError, check_choices, check_word, choice
from fullshard.plan.choices import GATHERS_OF_XLA
from fullshard.plan.engine_traits import EngineLimit

HomeName = Literal["device", "host", "disk"]
Layout = Literal["replicated", "optimizer", "sharded", "experts"]
Remat = Literal["none", "selective", "full"]  # from the fastest to the leanest
StrategyName = Literal["ddp", "zero1", "zero2", "zero3", "hybrid", "hpz", "mixed"]
Split = Literal["output", "input", "vocabulary", "whole"]  # how the tensor axis splits a module
SplitRules = tuple[tuple[str, Split], ...]  # by pattern of module paths; the first that matches holds


@dataclass(frozen=True)
class StrategyChoices(Part):
    """What a strategy makes the layout of units from; see `planner/strategies.py`."""

    PATH: ClassVar = ""
    NAME: ClassVar = "{}"

    strategy: StrategyName = choice("zero3", "What is sharded, and when it is gathered.", open=True, label="Strategy")
    replicate: int = choice(1, "`hybrid`: copies of the sharded model.", needs=("strategy", ("hybrid",)), label="Mesh: copies")
    reshard: int | None = choice(
        None, "`hpz`: ranks that keep the parameters between forward and backward.", needs=("strategy", ("hpz",)), least=2
    )
    replicate_below: int = choice(
        0, "`mixed`: units with fewer parameters are replicated.", needs=("strategy", ("mixed",)), least=0, fixable=False
    )
    keep_whole: tuple[str, ...] = choice(
        (), "`mixed`: units that are replicated, by name.", needs=("strategy", ("mixed",)), fixable=False
    )
    remat_every: int = choice(1, "Recompute every k-th block only.", needs=("remat", ("selective", "full")), fixable=False)
    prefetch: int | None = choice(None, "Units gathered ahead, forward and backward.", open=True, limits=GATHERS_OF_XLA)


@dataclass(frozen=True)
class Home(Part):
    """Where a unit's bytes rest between uses."""

    PATH: ClassVar = "units[].home.{}"
    NAME: ClassVar = "home.{}"
    LIMITS: ClassVar = {"jax": EngineLimit("only the torch engine has it", "write 'host'", lambda h: h == "disk", idle=False)}

    params: HomeName = choice(
        "device",
        "The shards that parameters are gathered from: `device`, `host` or `disk`. `disk` needs the optimizer state on the host "
        "or on disk.",
        open=True,
        guide="homes",
        label="Parameters in",
    )
    optimizer: HomeName = choice("device", "Master copy and moments.", open=True, guide="homes", label="Optimizer in")
    activations: HomeName = choice("device", "What blocks save for backward.", open=True, guide="homes", label="Activations in")

    def __post_init__(self) -> None:
        check_choices(self, "home.")

    def __str__(self) -> str:
        places = (self.params, self.optimizer, self.activations)
        return places[0] if len(set(places)) == 1 else "/".join(places)


@dataclass(frozen=True)
class Unit(Part):
    """Modules that gather, compute and free together.

    `layout`: `sharded` splits parameters, gradients and optimizer state over the mesh's shard axis. `optimizer` splits the
    optimizer state, and keeps parameters and gradients whole during a step (ZeRO-1). `replicated` keeps everything whole on
    every rank. `experts` spreads a mixture's experts over the mesh's expert axis, sends tokens to them, and shards each rank's
    experts over the rest of the shard axis.
    `reshard`: when gathered parameters are freed. True: after forward, and they are gathered again for backward. False: after
    backward. A number: after forward, but each group of so many ranks keeps a copy, so backward gathers only within it.
    """

    PATH: ClassVar = "units[].{}"

    name: str
    modules: tuple[str, ...]
    layout: Layout = choice("sharded", "See [layout](#layout).")
    reshard: bool | int = choice(
        True,
        "See [reshard](#reshard).",
        limits={
            "jax": EngineLimit(
                "on JAX parameters are kept or freed",
                "write True or False",
                lambda value: not isinstance(value, bool),
                idle=False,
            )
        },
    )
    remat: Remat = choice("none", "What blocks recompute in backward.", name="remat", open=True, label="Remat")
    home: Home = field(default_factory=Home)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PlanError(f"unit.name must be a non-empty string, not {self.name!r}")
        if not isinstance(self.modules, tuple) or not self.modules or not all(isinstance(m, str) for m in self.modules):
            raise PlanError(f"unit {self.name}: modules must be a non-empty tuple of module names, not {self.modules!r}")
        check_choices(self, f"unit {self.name}: ")
        if not isinstance(self.home, Home):
            raise PlanError(f"unit {self.name}: home must be a Home, not {self.home!r}")
        if not isinstance(self.reshard, int):  # bool is an int
            raise PlanError(f"unit {self.name}: reshard must be True, False or a number of ranks, not {self.reshard!r}")
        if not isinstance(self.reshard, bool) and self.reshard < 2:
            raise PlanError(f"unit {self.name}: reshard = {self.reshard} must be at least 2 ranks; write True or False instead")
        if self.layout not in ("sharded", "experts") and self.reshard is not False:
            raise PlanError(f"unit {self.name}: reshard = {self.reshard} has no effect with layout '{self.layout}'; write False")


def checked_splits(rules: object) -> SplitRules:
    """Rules for the tensor axis, from a dict or pairs. Raise for one that makes no sense."""
    pairs: list[Any] = (
        list(rules.items()) if isinstance(rules, dict) else [*rules] if isinstance(rules, list | tuple) else [rules]
    )
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            example = "{'*.fc1': 'output', '*.fc2': 'input'}"
            raise PlanError(f"split must be a dict of module patterns, such as {example}, not {rules!r}")
    for pattern, how in pairs:
        if not isinstance(pattern, str) or not pattern:
            raise PlanError(f"split: a pattern must be a module path with wildcards, not {pattern!r}")
        check_word(f"split: {pattern}", how, get_args(Split))
    return tuple((pattern, how) for pattern, how in pairs)


def refuse_twice(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlanError(f"{what} {name!r} appears twice in the plan; give each {what} one place")
        seen.add(name)
