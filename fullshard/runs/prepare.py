"""From a recipe to everything that a run needs. All errors that can be found before ranks start are found here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fullshard import optimizer
from fullshard.checkpoint.place import Place, open_place
from fullshard.cluster.cluster import Cluster
from fullshard.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_hash
from fullshard.data.training_data import TokenData, TrainingData
from fullshard.engine import Engine, load_engine
from fullshard.errors import FullshardError
from fullshard.model import presets
from fullshard.model.description import Description
from fullshard.model.description_cache import cached_description
from fullshard.model.presets import PRESETS
from fullshard.plan import Batch, Home, Plan
from fullshard.planner.estimate import Estimate, estimate
from fullshard.planner.search.search import find_plan
from fullshard.planner.search.space import FIXABLE
from fullshard.planner.time.timeline import timeline
from fullshard.reading import is_plain_file, parse_json, read_text
from fullshard.runs.disk_space import filed_bytes, free_disk, refuse_full_disk
from fullshard.runs.open_data import largest_batch, open_data, refuse_first_batch
from fullshard.runs.recipe import Recipe
from fullshard.runs.recipe_sections import OWN, changed
from fullshard.status import say
from fullshard.strategies import choose
from fullshard.text import parse_bytes


@dataclass(frozen=True)
class Prepared:
    """A recipe that was checked against its model, its data and the number of ranks."""

    engine: Engine[Any, Any]
    recipe: Recipe
    plan: Plan
    model: Any  # without memory for its weights
    weights: Path | None
    data: TrainingData
    valid: TrainingData | None
    tokenizer: Tokenizer | None  # to sample with
    cluster: Cluster  # what the plan is predicted for
    description: Description | None  # the model's, where its costs are known
    estimate: Estimate | None  # what the planner expects of it
    rest_seconds: float | None = None  # of a step, if its disk cost nothing


def prepare(recipe: Recipe, ranks: int | None, engine: Engine[Any, Any] | None = None) -> Prepared:
    """Check the recipe against its model, its data and this many ranks. `ranks`: by default all GPUs, or 2. `engine`: by
    default torch's."""
    engine = engine or load_engine("torch")
    ranks = ranks if ranks is not None else engine.local_devices()
    if ranks < 1:
        raise FullshardError(f"ranks must be at least 1, not {ranks}")
    say("building the model")
    model = engine.load_model(recipe.model.name, init=recipe.model.init, call=recipe.model.call, scan=recipe.model.scan)
    engine.refuse_loss(model, recipe.loss)
    weights = weights_of(recipe)
    if recipe.lora:
        model = engine.add_adapters(model, **recipe.lora.model_dump())
    if recipe.lora and weights is None:
        raise FullshardError(
            f"lora trains adapters on weights that {recipe.model.name} has not: they would be drawn at random; write "
            "model.weights = 'path/to/weights'"
        )
    if weights:
        engine.check_weights(model, weights)
    cluster = _cluster(recipe, ranks, engine)
    opened = cache(lambda: _open_data(recipe, model, engine))
    say("planning")
    plan, expected, known = _plan(recipe, model, cluster, engine, lambda: opened()[0])
    if recipe.plan.cluster and expected is None:
        raise FullshardError(
            f"plan.cluster has no effect: a step of {recipe.model.name} is predicted with plan.strategy = 'auto' alone; "
            "write that, or leave it out"
        )
    engine.refuse(model, plan, make_optimizer(recipe), disk_of(recipe, plan))
    if directory := disk_of(recipe, plan):
        refuse_full_disk(directory, _filed(recipe, plan, model, expected, engine), ranks)
    data, valid = opened()
    for part in (data, *([valid] if valid else [])):
        batch = refuse_first_batch(recipe, plan, part)
        engine.refuse_batch(model, engine.named_loss(run_loss(recipe)), batch)
    rest = _without_disk(recipe, plan, known, cluster) if known and expected else None
    return Prepared(engine, recipe, plan, model, weights, data, valid, tokenizer_of(recipe, data), cluster, known, expected, rest)


def _open_data(recipe: Recipe, model: Any, engine: Engine[Any, Any]) -> tuple[TrainingData, TrainingData | None]:
    say("opening the data")
    return open_data(recipe, model, engine)


def _plan(
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


def described_units(recipe: Recipe, model: Any, engine: Engine[Any, Any], *, experts: bool = False) -> Description:
    """The model's units, as the recipe's rules group them. What they cost is not traced."""
    return engine.describe(model, title=recipe.model.name, experts=experts, **recipe.plan.unit_rules)


def run_loss(recipe: Recipe) -> str:
    """The name of the loss that a run computes, as `Engine.named_loss` knows it."""
    return "call" if recipe.model.call and recipe.loss == "plain" else recipe.loss


def planned_loss(recipe: Recipe) -> Literal["chunked", "plain"]:
    """The loss as the planner knows it."""
    return "chunked" if recipe.loss == "chunked" else "plain"


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


def expected_of(
    recipe: Recipe, plan: Plan, description: Description | None, cluster: Cluster, engine: str = "torch"
) -> Estimate | None:
    kinds = plan.precision
    if description is None or plan.mesh.tensor > 1 or not _traced(description, kinds.compute):
        return None
    if kinds.output not in (None, kinds.compute):  # its activations are not predicted
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


def _without_disk(recipe: Recipe, plan: Plan, description: Description, cluster: Cluster) -> float | None:
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


def _filed(recipe: Recipe, plan: Plan, model: Any, expected: Estimate | None, engine: Engine[Any, Any]) -> int:
    """Bytes of a rank's files, activations included if they are known."""
    if expected is not None:
        return expected.disk.allocated_bytes
    return filed_bytes(plan, described_units(recipe, model, engine), make_optimizer(recipe))


def _traced(description: Description, compute: str) -> bool:
    return description.costs is not None and any(key[0] == compute for key in description.costs.traces)


def _cluster(recipe: Recipe, ranks: int, engine: Engine[Any, Any]) -> Cluster:
    """The cluster that the recipe names, or the devices that are there."""
    found = Cluster.load(recipe.plan.cluster) if recipe.plan.cluster else engine.local_cluster(ranks)
    if found.devices != ranks:
        found = replace(found, devices=ranks)  # a file of `measure` tells of one machine
    if recipe.disk.path is not None:
        found = found.with_disk(max(1, free_disk(recipe.disk.path, ranks)))
    return found


def weights_of(recipe: Recipe) -> Path | None:
    """The directory that the weights are read from, or None where they are drawn."""
    name, wanted = Path(recipe.model.name), recipe.model.weights
    if wanted == "draw":
        return None
    if wanted == "auto":
        return name if name.is_dir() and any(name.glob("*.safetensors")) else None
    if not Path(wanted).is_dir():
        raise FullshardError(f"model.weights = {wanted!r} is no directory; write one of safetensors files, 'auto' or 'draw'")
    if recipe.model.name in PRESETS:
        _refuse_scaled_positions(recipe.model.name, Path(wanted))
    return Path(wanted)


def _refuse_scaled_positions(preset: str, directory: Path) -> None:
    """Refuse weights that were trained with scaled rotary positions, which a preset does not have."""
    config = directory / "config.json"
    found = parse_json(read_text(config, "config"), str(config)) if is_plain_file(config) else {}
    if not isinstance(found, dict):
        raise FullshardError(f"{config} is no Hugging Face config: it is not a JSON object")
    scaling = found.get("rope_scaling") or found.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise FullshardError(f"{directory} scales its positions, which {preset} does not; write model.name = '{directory}'")


def tokenizer_of(recipe: Recipe, opened: TrainingData) -> Tokenizer | None:
    """The tokenizer for prompts; None if nothing is sampled."""
    if not recipe.sample.every:
        return None
    if not isinstance(opened, TokenData):
        return open_tokenizer(_sample_tokenizer(recipe), None)
    data = opened.tokens
    near = Path(recipe.model.name) / "tokenizer.json"
    given = recipe.sample.tokenizer or ("bytes" if data.tokenizer == "bytes" else str(near) if near.is_file() else None)
    if given is None:
        raise FullshardError("sample.prompts need a tokenizer; write sample.tokenizer = 'path/to/tokenizer.json'")
    if (
        given != "bytes"
        and Path(given).is_file()
        and data.tokenizer.startswith("sha256:")
        and tokenizer_hash(Path(given)) != data.tokenizer
    ):
        raise FullshardError(f"sample.tokenizer = {given!r} is not the tokenizer that {data.path} was packed with")
    return open_tokenizer(given, None)


def _sample_tokenizer(recipe: Recipe) -> str:
    """The tokenizer for prompts where the data does not name one."""
    near = Path(recipe.model.name) / "tokenizer.json"
    if recipe.sample.tokenizer is None and not near.is_file():
        raise FullshardError("sample.prompts need a tokenizer; write sample.tokenizer = 'path/to/tokenizer.json'")
    return recipe.sample.tokenizer or str(near)


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
        remat=wanted.remat,
        remat_every=wanted.remat_every,
        compile=wanted.compile,
        home=Home(recipe.home.params, recipe.home.optimizer, recipe.home.activations),
        staging=recipe.home.staging,
        cpu_share=recipe.home.cpu_share,
        backlog=recipe.home.backlog,
    )


def disk_of(recipe: Recipe, plan: Plan) -> str | None:
    """The directory for what the plan puts on disk."""
    on_disk = [u.name for u in plan.units if "disk" in (u.home.params, u.home.optimizer, u.home.activations)]
    if on_disk and recipe.disk.path is None:
        raise FullshardError(f"unit {on_disk[0]} of the plan has a home on disk; write disk.path, a directory there")
    if recipe.disk.path is not None and not on_disk and recipe.plan.file is not None:
        raise FullshardError("disk.path has no effect: no unit of the plan has a home on disk; leave it out")
    return recipe.disk.path if on_disk else None


def _spell(field: str, *value: object) -> str:
    """A field of a strategy as the recipe's key."""
    return f"plan.{field} = {value[0]!r}" if value else f"plan.{field}"


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


def checkpoint_dir_of(recipe: Recipe, directory: Path) -> Place:
    """Where a run's checkpoints lie."""
    return open_place(recipe.checkpoint.path or directory / "checkpoints")


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
