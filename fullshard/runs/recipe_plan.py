"""The plan of a recipe: of its file, of its strategy, or found by a search; and what the planner expects of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from fullshard import optimizer
from fullshard.cluster.cluster import Cluster
from fullshard.data.training_data import TrainingData
from fullshard.engine import Engine
from fullshard.errors import FullshardError
from fullshard.model import presets
from fullshard.model.description import Description
from fullshard.model.description_cache import cached_description
from fullshard.model.presets import PRESETS
from fullshard.plan import Batch, Home, Plan
from fullshard.planner.estimate import Estimate, estimate
from fullshard.planner.search.search import find_plan
from fullshard.planner.search.space import FIXABLE
from fullshard.planner.search.staging_slots import tune_updates
from fullshard.planner.step.offload_bytes import waits_for_norm
from fullshard.planner.time.timeline import timeline
from fullshard.runs.open_data import largest_batch
from fullshard.runs.recipe import Recipe
from fullshard.runs.recipe_sections import OWN, changed
from fullshard.status import say
from fullshard.strategies import choose
from fullshard.text import parse_bytes
from fullshard.update_pieces import STAGING


def find_recipe_plan(
    recipe: Recipe, model: Any, cluster: Cluster, engine: Engine[Any, Any], data: Callable[[], TrainingData]
) -> tuple[Plan, Estimate | None, Description | None]:
    """The plan; its estimate, if costs are known; and the description with those costs. `data`: opens the training data, of
    which a batch is traced if the objective is not causal."""
    causal = recipe.data.objective == "causal"
    own = recipe.lora or any(recipe.plan.unit_rules.values())  # other parameters or units than the preset's
    shipped = presets.describe(recipe.model.name) if recipe.model.name in PRESETS and not own and causal else None
    if recipe.plan.strategy != "auto" or recipe.plan.file is not None:
        plan = make_plan(recipe, described_units(recipe, model, engine, experts=recipe.plan.expert > 1), cluster.devices)
        fused = engine.name == "jax" and cluster.device.kind != "cpu"  # whatever the plan says, XLA compiles
        if engine.name == "torch" and cluster.device.kind == "cuda" and _leaves_updates_open(recipe, plan):
            shipped = shipped or (_costs_or_none(recipe, model, engine) if causal else None)
            plan = _tuned(recipe, plan, shipped, cluster)
        expected = expected_of(recipe, replace(plan, compile=True) if fused else plan, shipped, cluster, engine.name)
        return plan, expected, shipped
    if shipped is None or not _traced(shipped, recipe.plan.compute):
        shipped = describe_costs(recipe, model, engine) if causal else _describe_example(recipe, model, engine, data())
    found = find_plan(
        shipped,
        cluster,
        sequence=recipe.sequence if causal else None,
        global_batch=recipe.train.global_batch,
        fix=_pinned(recipe) | _only_rows(recipe, shipped),
        limit=parse_bytes(recipe.plan.limit) if recipe.plan.limit else None,
        loss=planned_loss(recipe),
        optimizer=make_optimizer(recipe),
        clip=recipe.optim.clip is not None,
        disk=recipe.disk.path is not None,
        engine=engine.name,
    )
    return found.plan, found.estimate, shipped


def make_plan(recipe: Recipe, description: Any, ranks: int) -> Plan:
    """The plan of the recipe's file or strategy, for this many ranks."""
    wanted = recipe.plan
    if wanted.file is not None:
        return _plan_of_file(recipe, wanted.file, ranks)
    if ranks % (wanted.tensor * wanted.replicate):
        raise FullshardError(f"plan.tensor = {wanted.tensor} × plan.replicate = {wanted.replicate} must divide the {ranks} ranks")
    rows = ranks // wanted.tensor * recipe.train.micro_batch
    if recipe.train.global_batch % rows:
        raise FullshardError(
            f"train.global_batch = {recipe.train.global_batch} is not a multiple of {rows}: "
            f"{ranks // wanted.tensor} data ranks × train.micro_batch = {recipe.train.micro_batch}"
        )
    return choose(
        wanted.strategy,
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
        batch=Batch(recipe.train.micro_batch, recipe.sequence, recipe.train.global_batch // rows, wanted.sync),
        prefetch=wanted.depths,
        wire=wanted.wire,
        kernels=wanted.kernels,
        remat=wanted.remat,
        remat_every=wanted.remat_every,
        compile=wanted.compile,
        home=Home(recipe.home.params, recipe.home.optimizer, recipe.home.activations),
        staging=recipe.home.staging or STAGING,
        cpu_share=recipe.home.cpu_share,
        backlog=recipe.home.backlog,
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


def describe_costs(recipe: Recipe, model: Any, engine: Engine[Any, Any]) -> Description:
    """The model with its costs, which are kept on disk unless adapters or rules for units change the description."""
    rules, name, sequence, compute = recipe.plan.unit_rules, recipe.model.name, recipe.sequence, recipe.plan.compute

    def trace() -> Description:
        return engine.describe(model, title=name, micro_batch=1, sequence=sequence, compute=compute, **rules)

    own = recipe.lora or recipe.model.call or any(rules.values())
    return trace() if own else cached_description(name, sequence=sequence, compute=compute, make=trace)


def _describe_example(recipe: Recipe, model: Any, engine: Engine[Any, Any], data: TrainingData) -> Description:
    """The model with the costs of computing batches of its data with its own loss."""
    say("tracing a batch of the data")
    example, loss = largest_batch(recipe, data), engine.named_loss(recipe.loss)
    return engine.describe(model, title=recipe.model.name, example=example, loss=loss, compute=recipe.plan.compute)


def _only_rows(recipe: Recipe, description: Description) -> dict[str, Any]:
    """The micro-batch that a search must keep, if the model was traced for that one alone."""
    costs = description.costs
    return {"micro_batch": recipe.train.micro_batch} if costs and costs.example and costs.shape else {}


def _pinned(recipe: Recipe) -> dict[str, Any]:
    """The choices of the recipe that a search must keep. The compute dtype is always one of them."""
    keys = changed(recipe.plan) & (set(FIXABLE) - {"strategy"})
    pinned = {key: getattr(recipe.plan, key) for key in keys} | {"compute": recipe.plan.compute}
    pinned |= {f"home.{key}": getattr(recipe.home, key) for key in changed(recipe.home)}
    return pinned | ({"micro_batch": recipe.train.micro_batch} if "micro_batch" in changed(recipe.train) else {})


def _leaves_updates_open(recipe: Recipe, plan: Plan) -> bool:
    """True if updates of offloaded state wait for the norm, and the recipe does not say how they pass the device."""
    own = changed(recipe.home) & {"staging", "cpu_share"} or recipe.plan.file is not None
    return plan.offloads_state and not own and waits_for_norm(plan, recipe.optim.clip is not None)


def _costs_or_none(recipe: Recipe, model: Any, engine: Engine[Any, Any]) -> Description | None:
    """What the model costs; None if it cannot be traced, which a named strategy does not need."""
    say("tracing the model, to choose how its offloaded state is updated")
    try:
        return describe_costs(recipe, model, engine)
    except FullshardError as error:
        say(f"{error}. Offloaded state is updated in the default way")
        return None


def _tuned(recipe: Recipe, plan: Plan, description: Description | None, cluster: Cluster) -> Plan:
    """The plan with the staging slots that make it fastest, where its costs are known."""
    if description is None or plan.mesh.tensor > 1 or not _traced(description, plan.precision.compute):
        return plan
    clip, limit = recipe.optim.clip is not None, parse_bytes(recipe.plan.limit) if recipe.plan.limit else None
    common: dict[str, Any] = {"loss": planned_loss(recipe), "optimizer": make_optimizer(recipe), "clip": clip}
    return tune_updates(plan, description, cluster, limit=limit, **common)[0]


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
