"""The plan of a recipe: of its file, or the best one with what the recipe gives; and what the planner expects of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from fullshard.base.errors import FullshardError
from fullshard.base.status import say
from fullshard.base.text import parse_bytes
from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.plan import optimizer
from fullshard.plan.choice_table import NAMED, strategy_arguments
from fullshard.plan.engine_traits import TRAITS
from fullshard.plan.plan import Home, Plan
from fullshard.planner.estimate import Estimate, estimate
from fullshard.planner.search.alternatives import NothingFitsError
from fullshard.planner.search.plan_space import REMATS
from fullshard.planner.search.search import find_plan
from fullshard.planner.strategies import choose
from fullshard.planner.time.timeline import timeline
from fullshard.runs.prepare.describe_model import Described, has_costs
from fullshard.runs.prepare.plan_choices import Asked, PlanChoice, plan_choices
from fullshard.runs.recipe.plan_section import UNSEARCHED, choices_of_section
from fullshard.runs.recipe.recipe import Recipe
from fullshard.runs.recipe.recipe_sections import OWN, changed

HOMES = (Home(), Home(optimizer="host"), Home("host", "host"), Home("host", "host", "host"))  # less and less on the device


@dataclass(frozen=True)
class RecipePlan:
    """The plan of a recipe. `choices`: the plan's, by key, with who made each. `cluster`: what it is made for. `description`: of
    the model with its costs, if those are known, and `estimate` what the planner expects then; `rest_seconds`: of a step, if its
    disk cost nothing."""

    plan: Plan
    choices: dict[str, PlanChoice]
    cluster: Cluster
    description: Description | None
    estimate: Estimate | None
    rest_seconds: float | None


def plan_recipe(asked: Asked, described: Described) -> RecipePlan:
    """The plan that is asked for, with what the recipe leaves open chosen for the cluster's devices."""
    recipe, cluster, known = asked.recipe, asked.cluster, described.costs
    plan, strategy = (asked.plan, "file") if asked.plan else _choose(asked, described)
    fused = TRAITS[asked.engine].one_program and cluster.device.kind != "cpu"  # whatever the plan says, XLA compiles
    expected = expected_of(recipe, replace(plan, compile=True) if fused else plan, known, cluster, asked.engine)
    if recipe.plan.cluster and expected is None:
        raise FullshardError(
            f"plan.cluster has no effect: what a step of {recipe.model.name} costs with this plan is not known; leave it out"
        )
    rest = seconds_without_disk(recipe, plan, known, cluster) if known and expected else None
    return RecipePlan(plan, plan_choices(asked, plan, strategy), cluster, known, expected, rest)


def _choose(asked: Asked, described: Described) -> tuple[Plan, str]:
    """The best plan of the recipe's strategy, or of any, and the strategy. Where costs are not known, zero3 stands for any."""
    recipe, known, wanted = asked.recipe, described.costs, asked.recipe.plan
    if wanted.wanted == "auto" and known:
        return _search(asked, known, {})
    strategy = "zero3" if wanted.wanted == "auto" else wanted.wanted
    plan = make_plan(recipe, described.units, asked.cluster.devices, strategy)
    if known is None or plan.mesh.tensor > 1 or not has_costs(known, plan.precision.compute):
        return plan, strategy
    if changed(wanted) & UNSEARCHED:
        return _first_that_fits(asked, described.units, known), strategy
    try:
        return _search(asked, known, {"strategy": strategy})[0], strategy
    except NothingFitsError as error:
        say(f"{error}. The plan is made as it is named")
        return plan, strategy


def _search(asked: Asked, known: Description, fix: dict[str, Any]) -> tuple[Plan, str]:
    """The best plan with the recipe's choices and these, and its strategy."""
    recipe = asked.recipe
    found = find_plan(
        known,
        asked.cluster,
        sequence=recipe.sequence if recipe.data.objective == "causal" else None,
        global_batch=recipe.train.global_batch,
        fix=_pinned(recipe) | fix | _only_rows(recipe, known),
        limit=parse_bytes(recipe.plan.limit) if recipe.plan.limit else None,
        loss=planned_loss(recipe),
        optimizer=make_optimizer(recipe),
        clip=recipe.optim.clip is not None,
        disk=recipe.disk.path is not None,
        engine=asked.engine,
    )
    return found.plan, found.strategy


def _first_that_fits(asked: Asked, units: Description, known: Description) -> Plan:
    """The first of the recipe's plans that fits, from the fastest to the leanest; the first one, if none does."""
    plans = list(_by_growing_seconds(asked.recipe, units, asked.cluster))
    estimates = ((plan, expected_of(asked.recipe, plan, known, asked.cluster, asked.engine)) for plan in plans)
    return next((plan for plan, found in estimates if found is None or found.fits), plans[0])


def _by_growing_seconds(recipe: Recipe, units: Description, cluster: Cluster) -> Iterator[Plan]:
    """Plans of the named strategy with what is open of compile, remat and homes chosen, the fastest first."""
    wanted, blocks = recipe.plan, any(u.kind == "block" for u in units.units)
    compiled = wanted.compile if wanted.compile is not None else blocks and cluster.device.kind != "cpu" and wanted.expert == 1
    given = {key: getattr(recipe.home, key) for key in changed(recipe.home)}
    for home in HOMES[: 4 if blocks else 3]:
        for remat in REMATS if blocks and wanted.remat is None else (wanted.remat or "none",):
            plan = wanted.model_copy(update={"remat": remat, "compile": compiled})
            homes = recipe.home.model_copy(update=vars(home) | given)
            yield make_plan(recipe.model_copy(update={"plan": plan, "home": homes}), units, cluster.devices)


def make_plan(recipe: Recipe, description: Any, ranks: int, strategy: str | None = None) -> Plan:
    """The plan of the recipe's strategy, or of another one, for this many ranks. What is open is as in `fullshard.zero3`."""
    wanted, micro_batch, home = recipe.plan, recipe.train.micro_batch or 1, recipe.home
    if ranks % (wanted.tensor * wanted.replicate):
        raise FullshardError(f"plan.tensor = {wanted.tensor} × plan.replicate = {wanted.replicate} must divide the {ranks} ranks")
    rows = ranks // wanted.tensor * micro_batch
    if recipe.train.global_batch % rows:
        raise FullshardError(
            f"train.global_batch = {recipe.train.global_batch} is not a multiple of {rows}: "
            f"{ranks // wanted.tensor} data ranks × train.micro_batch = {micro_batch}"
        )
    given = choices_of_section(wanted) | choices_of_section(home) | {"strategy": None, "micro_batch": micro_batch}
    given |= {"batch.sequence": recipe.sequence, "accumulate": recipe.train.global_batch // rows}
    return choose(strategy or wanted.wanted, description, devices=ranks, spell=_spell, **strategy_arguments(given, _spell))


def _spell(field: str, *value: object) -> str:
    """A field of a strategy as the recipe's key."""
    return f"plan.{field} = {value[0]!r}" if value else f"plan.{field}"


def _only_rows(recipe: Recipe, description: Description) -> dict[str, Any]:
    """The micro-batch that a search must keep, if the model was traced for that one alone."""
    costs = description.costs
    return {"micro_batch": recipe.train.micro_batch or 1} if costs and costs.example and costs.shape else {}


def _pinned(recipe: Recipe) -> dict[str, Any]:
    """The choices of a recipe that a search must keep."""
    keys = {key for key in changed(recipe.plan) - {"strategy"} if key in NAMED and NAMED[key].fixable}
    pinned = {key: getattr(recipe.plan, key) for key in keys}
    pinned |= {f"home.{key}": getattr(recipe.home, key) for key in changed(recipe.home)}
    return pinned | ({"micro_batch": recipe.train.micro_batch} if recipe.train.micro_batch else {})


def expected_of(
    recipe: Recipe, plan: Plan, description: Description | None, cluster: Cluster, engine: str = "torch"
) -> Estimate | None:
    kinds = plan.precision
    if description is None or plan.mesh.tensor > 1 or not has_costs(description, kinds.compute):
        return None
    if kinds.output not in (None, kinds.compute):  # its activations are not predicted
        return None
    if kinds.float8 and cluster.device.kind != "cpu" and cluster.device.peak.fp8 is None:  # a GPU whose rate is not known
        return None
    return estimate(
        plan,
        description,
        cluster,
        loss=planned_loss(recipe),
        optimizer=make_optimizer(recipe),
        clip=recipe.optim.clip is not None,
        engine=engine,
    )


def seconds_without_disk(recipe: Recipe, plan: Plan, description: Description, cluster: Cluster) -> float | None:
    """The step time if everything on disk were in host memory; None if nothing is on disk."""
    homes = ("params", "optimizer", "activations")
    on_disk: dict[str, Any] = {u.name: {k: "host" for k in homes if getattr(u.home, k) == "disk"} for u in plan.units}
    if not any(on_disk.values()):
        return None
    units = tuple(replace(u, home=replace(u.home, **on_disk[u.name])) for u in plan.units)
    return step_seconds(recipe, replace(plan, units=units), description, cluster)


def step_seconds(recipe: Recipe, plan: Plan, description: Description, cluster: Cluster) -> float:
    """The predicted step time."""
    clip = recipe.optim.clip is not None
    return timeline(plan, description, cluster, loss=planned_loss(recipe), optimizer=make_optimizer(recipe), clip=clip).seconds


def run_loss(recipe: Recipe) -> str:
    """The name of the loss that a run computes, as `Engine.named_loss` knows it."""
    return "call" if recipe.model.call and recipe.loss == "plain" else recipe.loss


def planned_loss(recipe: Recipe) -> Literal["chunked", "plain"]:
    """The loss as the planner knows it."""
    return "chunked" if recipe.loss == "chunked" else "plain"


def make_optimizer(recipe: Recipe) -> optimizer.Optimizer:
    o = recipe.optim
    own: dict[str, Any] = {key: getattr(o, key) for key in OWN.get(o.name, ())}
    match o.name:
        case "sgd":
            return optimizer.SGD(lr=o.lr, decay_all=o.decay_all, **own)
        case "adamw":
            return optimizer.AdamW(lr=o.lr, decay_all=o.decay_all, **own)
        case "adam":
            return optimizer.Adam(lr=o.lr, decay_all=o.decay_all, **own)
    return optimizer.TorchOptimizer(o.name, o.lr, tuple(o.options.items()), o.decay_all)
