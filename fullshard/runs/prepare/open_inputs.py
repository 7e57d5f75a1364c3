"""Opens what a recipe names: the model, its weights, the data, and the tokenizer of prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.reading import is_plain_file, parse_json, read_text
from fullshard.base.status import say
from fullshard.data.tokenizer import Tokenizer, open_tokenizer, tokenizer_hash
from fullshard.data.training_data import TokenData, TrainingData
from fullshard.engine.engine import Engine
from fullshard.model.presets import PRESETS
from fullshard.runs.prepare.open_data import open_data
from fullshard.runs.recipe.recipe import Recipe


@dataclass(frozen=True)
class Inputs:
    """What a recipe names, opened and checked against each other."""

    model: Any  # without memory for its weights
    weights: Path | None
    data: TrainingData
    valid: TrainingData | None
    tokenizer: Tokenizer | None  # to sample with


def open_inputs(recipe: Recipe, engine: Engine[Any, Any]) -> Inputs:
    """Open what the recipe names."""
    say("building the model")
    model = engine.model.load(recipe.model.name, init=recipe.model.init, call=recipe.model.call)
    if recipe.model.scan:
        model = engine.offered(engine.model.scan, "model.scan", "model.scan = true")(model)
    engine.trainer.refuse_loss(model, recipe.loss)
    weights = weights_of(recipe)
    if recipe.lora:
        model = engine.offered(engine.model.add_adapters, "lora")(model, **recipe.lora.model_dump())
    if recipe.lora and weights is None:
        raise FullshardError(
            f"lora trains adapters on weights that {recipe.model.name} has not: they would be drawn at random; write "
            "model.weights = 'path/to/weights'"
        )
    if weights:
        engine.model.check_weights(model, weights)
    say("opening the data")
    data, valid = open_data(recipe, model, engine)
    return Inputs(model, weights, data, valid, tokenizer_of(recipe, data))


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
    """The tokenizer for prompts: the recipe's, else the data's bytes, else the model's; None if nothing is sampled."""
    if not recipe.sample.every:
        return None
    packed_with = opened.tokens.tokenizer if isinstance(opened, TokenData) else ""
    near = Path(recipe.model.name) / "tokenizer.json"
    given = recipe.sample.tokenizer or ("bytes" if packed_with == "bytes" else str(near) if near.is_file() else None)
    if given is None:
        raise FullshardError("sample.prompts need a tokenizer; write sample.tokenizer = 'path/to/tokenizer.json'")
    known = given != "bytes" and packed_with.startswith("sha256:") and Path(given).is_file()
    if known and tokenizer_hash(Path(given)) != packed_with:
        raise FullshardError(f"sample.tokenizer = {given!r} is not the tokenizer that {opened.path} was packed with")
    return open_tokenizer(given, None)
