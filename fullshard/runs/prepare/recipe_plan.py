"""The plan of a recipe: of its file, or the best one with what the recipe gives; and what the planner expects of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from fullshard.base.errors import FullshardError
from fullshard.base.status import say
from fullshard.base.text import parse_bytes
from fullshard.cluster.topology import Cluster
from fullshard.data.training_data import TrainingData
from fullshard.engine.protocols import Engine
from fullshard.model import presets
from fullshard.model.description import Description
from fullshard.model.description_cache import cached_description
from fullshard.model.presets import PRESETS
from fullshard.plan import optimizer
from fullshard.plan.plan import Batch, DType, Home, Plan
from fullshard.plan.update_pieces import STAGING
from fullshard.planner.estimate import Estimate, estimate
from fullshard.planner.search.alternatives import NothingFitsError
from fullshard.planner.search.plan_space import FIXABLE, REMATS
from fullshard.planner.search.search import find_plan
from fullshard.planner.strategies import choose
from fullshard.planner.time.timeline import timeline
from fullshard.runs.prepare.open_data import largest_batch
from fullshard.runs.prepare.plan_choices import PlanChoice, plan_choices, settled
from fullshard.runs.recipe.recipe import Recipe
from fullshard.runs.recipe.recipe_sections import OWN, changed

UNSEARCHED = {"expert", "remat_every", "output"}  # keys of plans that a search does not make
HOMES = (Home(), Home(optimizer="host"), Home("host", "host"), Home("host", "host", "host"))  # less and less on the device


@dataclass(frozen=True)
class RecipePlan:
    """`choices`: the plan's, by key, with who made each. `estimate`: what the planner expects, if costs are known.
    `description`: of the model with those costs."""

    plan: Plan
    choices: dict[str, PlanChoice]
    estimate: Estimate | None
    description: Description | None


def find_recipe_plan(
    recipe: Recipe,
    model: Any,
    cluster: Cluster,
    engine: Engine[Any, Any],
    data: Callable[[], TrainingData],
    kept: dict[str, Any] | None = None,
) -> RecipePlan:
    """The plan of a recipe, with what it leaves open chosen for the cluster's devices.

    `data`: opens the training data, of which a batch is traced if the objective is not causal. `kept`: choices of the run that
    this one goes on with, see `plan_choices`.
    """
    asked, used = settled(recipe, cluster, kept or {}, engine.name)
    if recipe.plan.file is not None:
        plan = _plan_of_file(recipe, recipe.plan.file, cluster.devices)
        known, strategy = _shipped(asked, plan.precision.compute), "file"
    elif (strategy := recipe.plan.wanted) == "auto":
        plan, known, strategy = _searched_plan(asked, model, cluster, engine, data, required=recipe.plan.strategy is not None)
    else:
        plan, known = _named_plan(asked, model, cluster, engine, data)
    fused = engine.name == "jax" and cluster.device.kind != "cpu"  # whatever the plan says, XLA compiles
    expected = expected_of(asked, replace(plan, compile=True) if fused else plan, known, cluster, engine.name)
    return RecipePlan(plan, plan_choices(recipe, plan, strategy, used, engine.name), expected, known)


def _searched_plan(
    recipe: Recipe, model: Any, cluster: Cluster, engine: Engine[Any, Any], data: Callable[[], TrainingData], *, required: bool
) -> tuple[Plan, Description | None, str]:
    """The best plan of any strategy, the description with its costs, and the strategy. `required`: raise where the model cannot
    be traced; otherwise zero3 is taken."""
    try:
        known = _with_costs(recipe, model, engine, data)
    except FullshardError as error:
        if required:
            raise
        say(f"{error}. The strategy is zero3")
        return make_plan(recipe, described_units(recipe, model, engine), cluster.devices, "zero3"), None, "zero3"
    plan, strategy = _search(recipe, known, cluster, engine, _pinned(recipe))
    return plan, known, strategy


def _named_plan(
    recipe: Recipe, model: Any, cluster: Cluster, engine: Engine[Any, Any], data: Callable[[], TrainingData]
) -> tuple[Plan, Description | None]:
    """The plan of the named strategy, with the rest chosen as far as the model's costs are known; the description with those."""
    units = described_units(recipe, model, engine, experts=recipe.plan.expert > 1)
    plan = make_plan(recipe, units, cluster.devices)
    known = _shipped(recipe, plan.precision.compute)
    # A CPU leaves little to choose: tracing would take longer than it saves.
    if known is None and plan.mesh.tensor == 1 and (cluster.device.kind != "cpu" or recipe.plan.cluster):
        known = _costs_or_none(recipe, model, engine, data)
    if known is None or plan.mesh.tensor > 1 or not _traced(known, plan.precision.compute):
        return plan, known
    if recipe.plan.wanted == "mixed" or changed(recipe.plan) & UNSEARCHED:
        return _first_that_fits(recipe, units, known, cluster, engine), known
    try:
        return _search(recipe, known, cluster, engine, _pinned(recipe) | {"strategy": recipe.plan.wanted})[0], known
    except NothingFitsError as error:
        say(f"{error}. The plan is made as it is named")
        return plan, known


def _search(
    recipe: Recipe, known: Description, cluster: Cluster, engine: Engine[Any, Any], fix: dict[str, Any]
) -> tuple[Plan, str]:
    """The best plan with the fixed choices, and its strategy."""
    found = find_plan(
        known,
        cluster,
        sequence=recipe.sequence if recipe.data.objective == "causal" else None,
        global_batch=recipe.train.global_batch,
        fix=fix | _only_rows(recipe, known),
        limit=parse_bytes(recipe.plan.limit) if recipe.plan.limit else None,
        loss=planned_loss(recipe),
        optimizer=make_optimizer(recipe),
        clip=recipe.optim.clip is not None,
        disk=recipe.disk.path is not None,
        engine=engine.name,
    )
    return found.plan, found.strategy


def _first_that_fits(recipe: Recipe, units: Description, known: Description, cluster: Cluster, engine: Engine[Any, Any]) -> Plan:
    """The first of the recipe's plans that fits, from the fastest to the leanest; the first one, if none does."""
    plans = list(_by_growing_seconds(recipe, units, cluster))
    estimates = ((plan, expected_of(recipe, plan, known, cluster, engine.name)) for plan in plans)
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
    return choose(
        strategy or wanted.wanted,
        description,
        devices=ranks,
        tensor=wanted.tensor,
        expert=wanted.expert,
        replicate=wanted.replicate,
        reshard=wanted.reshard,
        replicate_below=wanted.replicate_below,
        keep_whole=wanted.keep_whole,
        spell=_spell,
        precision=wanted.precision,
        batch=Batch(micro_batch, recipe.sequence, recipe.train.global_batch // rows, wanted.sync or "every"),
        prefetch=wanted.depths,
        wire=wanted.wire,
        kernels=wanted.kernels,
        remat=wanted.remat or "none",
        remat_every=wanted.remat_every,
        compile=bool(wanted.compile),
        home=Home(home.params or "device", home.optimizer or "device", home.activations or "device"),
        staging=home.staging or STAGING,
        cpu_share=home.cpu_share,
        backlog=home.backlog,
    )


def _plan_of_file(recipe: Recipe, file: str, ranks: int) -> Plan:
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


def _spell(field: str, *value: object) -> str:
    """A field of a strategy as the recipe's key."""
    return f"plan.{field} = {value[0]!r}" if value else f"plan.{field}"


def described_units(recipe: Recipe, model: Any, engine: Engine[Any, Any], *, experts: bool = False) -> Description:
    """The model's units, as the recipe's rules group them. What they cost is not traced."""
    return engine.describe(model, title=recipe.model.name, experts=experts, **recipe.plan.unit_rules)


def describe_costs(recipe: Recipe, model: Any, engine: Engine[Any, Any], compute: DType) -> Description:
    """The model with its costs, which are kept on disk unless adapters or rules for units change the description."""
    rules, name, sequence = recipe.plan.unit_rules, recipe.model.name, recipe.sequence

    def trace() -> Description:
        return engine.describe(model, title=name, micro_batch=1, sequence=sequence, compute=compute, **rules)

    own = recipe.lora or recipe.model.call or any(rules.values())
    return trace() if own else cached_description(name, sequence=sequence, compute=compute, make=trace)


def _shipped(recipe: Recipe, compute: str) -> Description | None:
    """The preset's description, if that is what the recipe trains and its costs are known in this dtype."""
    own = recipe.lora or any(recipe.plan.unit_rules.values())  # other parameters or units than the preset's
    if own or recipe.data.objective != "causal" or recipe.model.name not in PRESETS:
        return None
    found = presets.describe(recipe.model.name)
    return found if _traced(found, compute) else None


def _with_costs(recipe: Recipe, model: Any, engine: Engine[Any, Any], data: Callable[[], TrainingData]) -> Description:
    """The model with its costs in the recipe's compute dtype: a preset's are known, another's are traced."""
    compute = recipe.plan.precision.compute
    if found := _shipped(recipe, compute):
        return found
    if recipe.data.objective == "causal":
        return describe_costs(recipe, model, engine, compute)
    say("tracing a batch of the data")
    example, loss = largest_batch(recipe, data()), engine.named_loss(recipe.loss)
    return engine.describe(model, title=recipe.model.name, example=example, loss=loss, compute=compute)


def _costs_or_none(recipe: Recipe, model: Any, engine: Engine[Any, Any], data: Callable[[], TrainingData]) -> Description | None:
    """What the model costs; None if it cannot be traced, which a named strategy does not need."""
    say("tracing the model, to choose what the recipe leaves open")
    try:
        return _with_costs(recipe, model, engine, data)
    except FullshardError as error:
        say(f"{error}. What the recipe leaves open is not chosen by costs")
        return None


def _only_rows(recipe: Recipe, description: Description) -> dict[str, Any]:
    """The micro-batch that a search must keep, if the model was traced for that one alone."""
    costs = description.costs
    return {"micro_batch": recipe.train.micro_batch or 1} if costs and costs.example and costs.shape else {}


def _pinned(recipe: Recipe) -> dict[str, Any]:
    """The choices of a settled recipe that a search must keep."""
    keys = changed(recipe.plan) & (set(FIXABLE) - {"strategy"})
    pinned = {key: getattr(recipe.plan, key) for key in keys}
    pinned |= {f"home.{key}": getattr(recipe.home, key) for key in changed(recipe.home)}
    return pinned | ({"micro_batch": recipe.train.micro_batch} if recipe.train.micro_batch else {})


def expected_of(
    recipe: Recipe, plan: Plan, description: Description | None, cluster: Cluster, engine: str = "torch"
) -> Estimate | None:
    kinds = plan.precision
    if description is None or plan.mesh.tensor > 1 or not _traced(description, kinds.compute):
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


def _traced(description: Description, compute: str) -> bool:
    return description.costs is not None and any(key[0] == compute for key in description.costs.traces)


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
