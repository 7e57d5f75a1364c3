"""From a recipe to everything that a run needs. All errors that can be found before ranks start are found here."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.reading import is_plain_file, parse_json, read_text
from fullshard.base.status import say
from fullshard.checkpoint.directories import Place, open_place
from fullshard.cluster.topology import Cluster
from fullshard.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_hash
from fullshard.data.training_data import TokenData, TrainingData
from fullshard.engine.protocols import Engine, load_engine
from fullshard.model.description import Description
from fullshard.model.presets import PRESETS
from fullshard.plan.plan import Plan
from fullshard.planner.device_limits import refuse_on_devices
from fullshard.planner.estimate import Estimate, refuse_idle_loss_kernel
from fullshard.runs.prepare.disk_space import filed_bytes, free_disk, refuse_full_disk
from fullshard.runs.prepare.open_data import open_data, refuse_first_batch
from fullshard.runs.prepare.plan_choices import PlanChoice
from fullshard.runs.prepare.recipe_plan import described_units, find_recipe_plan, make_optimizer, run_loss, seconds_without_disk
from fullshard.runs.recipe.recipe import Recipe


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
    choices: dict[str, PlanChoice] = field(default_factory=dict)  # of the plan, with who made each


def prepare(
    recipe: Recipe, ranks: int | None, engine: Engine[Any, Any] | None = None, kept: dict[str, Any] | None = None
) -> Prepared:
    """Check the recipe against its model, its data and this many ranks. `ranks`: by default all GPUs, or 2. `engine`: by
    default torch's. `kept`: what is left open as a checkpoint has it, see `plan_choices`."""
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
    found = find_recipe_plan(recipe, model, cluster, engine, lambda: opened()[0], kept)
    plan, expected, known = found.plan, found.estimate, found.description
    if recipe.plan.cluster and expected is None:
        raise FullshardError(
            f"plan.cluster has no effect: what a step of {recipe.model.name} costs with this plan is not known; leave it out"
        )
    engine.refuse(model, plan, make_optimizer(recipe), disk_of(recipe, plan))
    refuse_on_devices(plan, cluster)
    refuse_idle_loss_kernel(plan, recipe.loss)
    if directory := disk_of(recipe, plan):
        refuse_full_disk(directory, _filed(recipe, plan, model, expected, engine), ranks)
    data, valid = opened()
    for part in (data, *([valid] if valid else [])):
        batch = refuse_first_batch(recipe, plan, part)
        engine.refuse_batch(model, engine.named_loss(run_loss(recipe)), batch)
    rest = seconds_without_disk(recipe, plan, known, cluster) if known and expected else None
    shown = tokenizer_of(recipe, data)
    about = (cluster, known, expected, rest, found.choices)
    return Prepared(engine, recipe, plan, model, weights, data, valid, shown, *about)


def _open_data(recipe: Recipe, model: Any, engine: Engine[Any, Any]) -> tuple[TrainingData, TrainingData | None]:
    say("opening the data")
    return open_data(recipe, model, engine)


def _filed(recipe: Recipe, plan: Plan, model: Any, expected: Estimate | None, engine: Engine[Any, Any]) -> int:
    """Bytes of a rank's files, activations included if they are known."""
    if expected is not None:
        return expected.disk.allocated_bytes
    return filed_bytes(plan, described_units(recipe, model, engine), make_optimizer(recipe))


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


def disk_of(recipe: Recipe, plan: Plan) -> str | None:
    """The directory for what the plan puts on disk."""
    on_disk = [u.name for u in plan.units if "disk" in (u.home.params, u.home.optimizer, u.home.activations)]
    if on_disk and recipe.disk.path is None:
        raise FullshardError(f"unit {on_disk[0]} of the plan has a home on disk; write disk.path, a directory there")
    if recipe.disk.path is not None and not on_disk and recipe.plan.file is not None:
        raise FullshardError("disk.path has no effect: no unit of the plan has a home on disk; leave it out")
    return recipe.disk.path if on_disk else None


def checkpoint_dir_of(recipe: Recipe, directory: Path) -> Place:
    """Where a run's checkpoints lie."""
    return open_place(recipe.checkpoint.path or directory / "checkpoints")
