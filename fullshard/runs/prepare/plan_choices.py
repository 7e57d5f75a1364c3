"""What a recipe asks of a plan, and who made each choice: the recipe, an earlier part of the run, or the planner."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fullshard.base.errors import FullshardError
from fullshard.base.text import labelled
from fullshard.cluster.topology import Cluster
from fullshard.plan.choice import Choice
from fullshard.plan.choice_table import NAMED
from fullshard.plan.plan import DType, Plan, PlanError
from fullshard.runs.recipe.recipe import Recipe
from fullshard.runs.recipe.recipe_sections import changed

Origin = Literal["given", "kept", "chosen"]
# What a run says of its plan: what the planner or the engine may choose, and dtypes.
SHOWN = [row for row in NAMED.values() if row.path and row.recipe and (row.open or row.default in ("auto", "fp32"))]
NO_CHOICES = ("cluster", "limit", "prefetch_forward", "prefetch_backward")  # keys of the table beside them
KINDS = ("params", "optimizer", "activations")


@dataclass(frozen=True)
class PlanChoice:
    """A choice of a plan. `kept`: it is that of the checkpoint that the run goes on from."""

    value: str | int | float | bool
    origin: Origin


def kept_choices(plan: dict[str, Any] | None) -> dict[str, Any]:
    """What a run that goes on keeps of a checkpoint's plan, as data, where its recipe leaves it open: all that changes results
    and that the planner chooses."""
    try:
        found = Plan.from_dict(plan)
    except PlanError:  # another program's, or an older one: what differs in it is refused later
        return {}
    batch = found.batch
    return {"compute": found.precision.compute, "compile": found.compile, "micro_batch": batch.micro_batch, "sync": batch.sync}


@dataclass(frozen=True)
class Asked:
    """What a recipe asks of a plan. `given`: that recipe. `recipe`: the same with its compute dtype, and with what is `kept` of a
    checkpoint, by key. `plan`: that of the recipe's file."""

    recipe: Recipe
    given: Recipe
    cluster: Cluster
    kept: set[str]
    plan: Plan | None
    engine: str

    @property
    def compute(self) -> DType:
        """What the model computes in."""
        return self.plan.precision.compute if self.plan else self.recipe.plan.precision.compute


def asked_of(recipe: Recipe, cluster: Cluster, kept: dict[str, Any] | None = None, engine: str = "torch") -> Asked:
    """What the recipe asks of a cluster. `kept`: choices of the run that this one goes on with, see `kept_choices`."""
    plan, train, kept = recipe.plan, recipe.train, kept or {}
    own: dict[str, Any] = {key: kept[key] for key in ("compute", "compile") if key in kept and getattr(plan, key) is None}
    rows = train.micro_batch or kept.get("micro_batch", 0)
    accumulate, rest = divmod(train.global_batch, cluster.devices // plan.tensor * rows or 1)
    cut_as_before = rows > 0 and not rest  # another number of ranks may not allow it
    if cut_as_before and accumulate > 1 and plan.sync is None and "sync" in kept and engine not in NAMED["sync"].limits:
        own["sync"] = kept["sync"]
    used, update = set(own), {"micro_batch": train.micro_batch}
    if train.micro_batch is None and cut_as_before:
        used, update = used | {"micro_batch"}, {"micro_batch": rows}
    own.setdefault("compute", plan.compute or cluster.device.peak.fastest)
    found = recipe.model_copy(update={"plan": plan.model_copy(update=own), "train": train.model_copy(update=update)})
    return Asked(found, recipe, cluster, used, _plan_of_file(recipe, cluster.devices) if plan.file else None, engine)


def _plan_of_file(recipe: Recipe, ranks: int) -> Plan:
    file = recipe.plan.file
    assert file is not None
    plan = Plan.load(file)
    rows = plan.mesh.data * plan.batch.accumulate * plan.batch.micro_batch
    if plan.mesh.devices != ranks:
        raise FullshardError(f"{file} is for {plan.mesh.devices} devices, but {ranks} ranks will run; start that many")
    same_length = bool(plan.batch.dims) or plan.batch.sequence == recipe.sequence  # rows with dims have no length
    if rows != recipe.train.global_batch or not same_length:
        raise FullshardError(
            f"{file} is for steps of {rows} × {plan.batch.sequence} tokens, the recipe for "
            f"{recipe.train.global_batch} × {recipe.sequence}; make them agree"
        )
    return plan


def plan_choices(asked: Asked, plan: Plan, strategy: str) -> dict[str, PlanChoice]:
    """The choices of a plan by the recipe's keys. `strategy`: the plan's, by name."""
    recipe = asked.given
    if recipe.plan.file is not None:
        return {"file": PlanChoice(recipe.plan.file, "given")}
    given = _given(recipe)
    found: dict[str, PlanChoice] = {}
    for key, value in _values(plan, strategy, asked.engine).items():
        found[key] = PlanChoice(value, "given" if key in given else "kept" if key in asked.kept else "chosen")
    for key in sorted(given - set(found)):
        if (other := getattr(recipe.plan, key, None)) is not None and key not in NO_CHOICES:
            found[key] = PlanChoice(", ".join(other) if isinstance(other, tuple) else other, "given")
    return found


def _given(recipe: Recipe) -> set[str]:
    """The keys of the recipe's choices; those of homes with their section."""
    keys = changed(recipe.plan) | {f"home.{key}" for key in changed(recipe.home)}
    keys -= {"strategy"} if recipe.plan.strategy == "auto" else set()
    keys |= {"prefetch"} if keys & {"prefetch_forward", "prefetch_backward"} else set()
    return keys | ({"micro_batch"} if recipe.train.micro_batch else set())


def _values(plan: Plan, strategy: str, engine: str) -> dict[str, str | int | float | bool]:
    """What the planner may choose, by key, and the dtypes beside it. What the engine decides itself is left out."""
    found: dict[str, Any] = {"strategy": strategy}
    for row in SHOWN:
        limit = row.limits.get(engine)
        by_engine = limit is not None and limit.refused is None
        waits = row.needs is not None and not plan.offloads_state
        if not by_engine and not waits and (value := _value(row, plan)) is not None:
            found["prefetch" if row.owner == "prefetch" else row.recipe.removeprefix("plan.").removeprefix("train.")] = value
    return found


def _value(row: Choice, plan: Plan) -> Any:
    """The value of a choice in a plan; None if it has no effect there."""
    if row.owner.startswith("units[]"):
        owners: list[Any] = [unit.home if row.owner.endswith("home") else unit for unit in plan.units]
        return _others([getattr(owner, row.field) for owner in owners], row.default)
    part: Any = getattr(plan, row.owner) if row.owner else plan
    if row.owner == "prefetch":
        return part.forward if part.forward == part.backward else f"{part.forward}/{part.backward}"
    return None if row.idle and row.idle(part) else getattr(part, row.field)


def _others(values: list[str], usual: str) -> str:
    """What units have besides the usual value, or that one."""
    return " and ".join(dict.fromkeys(value for value in values if value != usual)) or usual


def choice_lines(choices: dict[str, PlanChoice]) -> Iterator[str]:
    """What was given, what is kept of a checkpoint, and what the planner chose, with the values."""
    for origin in get_args(Origin):
        made = {key: choice.value for key, choice in choices.items() if choice.origin == origin}
        if made:
            yield from labelled(origin, [_words(key, value) for key, value in made.items()])


def _words(key: str, value: object) -> str:
    if isinstance(value, bool):
        return key if value else f"no {key}"
    return f"{key.removeprefix('home.')} on {value}" if key.removeprefix("home.") in KINDS else f"{key} {value}"
