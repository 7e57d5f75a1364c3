"""Who made each choice of a run's plan: the recipe gave it, an earlier part of the run did, or the planner chose it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fullshard.base.text import labelled
from fullshard.cluster.topology import Cluster
from fullshard.plan.plan import Plan, PlanError
from fullshard.runs.recipe.recipe import Recipe
from fullshard.runs.recipe.recipe_sections import changed

Origin = Literal["given", "kept", "chosen"]
OF_TORCH = ("prefetch", "sync", "attention_kernel", "loss_kernel", "update_kernel")  # on JAX, XLA decides
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
    return {
        "compute": found.precision.compute,
        "compile": found.compile,
        "micro_batch": batch.micro_batch,
        "sync": batch.sync,
    }


def settled(recipe: Recipe, cluster: Cluster, kept: dict[str, Any], engine: str) -> tuple[Recipe, set[str]]:
    """The recipe with its compute dtype, and with what it leaves open and a checkpoint keeps; the keys of the latter."""
    plan, train = recipe.plan, recipe.train
    own: dict[str, Any] = {key: kept[key] for key in ("compute", "compile") if key in kept and getattr(plan, key) is None}
    rows = train.micro_batch or kept.get("micro_batch", 0)
    accumulate, rest = divmod(train.global_batch, cluster.devices // plan.tensor * rows or 1)
    cut_as_before = rows > 0 and not rest  # another number of ranks may not allow it
    if cut_as_before and accumulate > 1 and plan.sync is None and "sync" in kept and engine == "torch":
        own["sync"] = kept["sync"]
    used, update = set(own), {"micro_batch": train.micro_batch}
    if train.micro_batch is None and cut_as_before:
        used, update = used | {"micro_batch"}, {"micro_batch": rows}
    own.setdefault("compute", plan.compute or cluster.device.peak.fastest)
    return recipe.model_copy(update={"plan": plan.model_copy(update=own), "train": train.model_copy(update=update)}), used


def plan_choices(recipe: Recipe, plan: Plan, strategy: str, kept: set[str], engine: str) -> dict[str, PlanChoice]:
    """The choices of a plan by the recipe's keys. `strategy`: the plan's, by name; `kept`: keys of what a checkpoint keeps."""
    if recipe.plan.file is not None:
        return {"file": PlanChoice(recipe.plan.file, "given")}
    given = _given(recipe)
    found: dict[str, PlanChoice] = {}
    for key, value in _values(plan, strategy, engine).items():
        found[key] = PlanChoice(value, "given" if key in given else "kept" if key in kept else "chosen")
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
    """What the planner may choose, by key, and the dtypes beside it."""
    ahead, kernels = plan.prefetch, plan.kernels
    found: dict[str, Any] = {
        "strategy": strategy,
        "micro_batch": plan.batch.micro_batch,
        "sync": plan.batch.sync,
        "compute": plan.precision.compute,
        "reduce": plan.precision.reduce,
        "master": plan.precision.master,
        "remat": _others([unit.remat for unit in plan.units], "none"),
        "compile": plan.compile,
        "prefetch": ahead.forward if ahead.forward == ahead.backward else f"{ahead.forward}/{ahead.backward}",
        "attention_kernel": kernels.attention,
        "loss_kernel": kernels.loss,
        "update_kernel": kernels.update,
    }
    found |= {f"home.{kind}": _others([getattr(unit.home, kind) for unit in plan.units], "device") for kind in KINDS}
    if plan.offloads_state:
        found |= {"home.staging": plan.staging, "home.cpu_share": plan.cpu_share, "home.backlog": plan.backlog}
    hidden = {*(OF_TORCH if engine == "jax" else ()), *(("sync",) if plan.batch.accumulate == 1 else ())}
    return {key: value for key, value in found.items() if key not in hidden and value is not None}


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
