"""Build a model on the meta device from a name.

The name is a preset (`llama3-8b`), a Hugging Face `config.json` or its directory, or `file.py:callable` /
`package.module:callable` for a callable that returns a module. Such a callable is remembered: `shard` gives its model the
values of its own code.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import nn

from fullshard.base.callables import load_callable
from fullshard.base.errors import FullshardError, first_line
from fullshard.base.reading import is_directory, is_plain_file
from fullshard.engine.model import ModelFacts
from fullshard.model.hf_directory import config_file, unknown_model
from fullshard.model.presets import PRESETS
from fullshard.on_torch.model import built_in
from fullshard.on_torch.model.factory import Factory, keep_factory
from fullshard.on_torch.model.hf_config import model_builder
from fullshard.on_torch.model.lora import without_adapters
from fullshard.on_torch.model.model_call import ModelCall, set_call

INITS = ("factory", "modules")
LENGTHS = ("max_position_embeddings", "block_size", "max_seq_len")  # what configs call the longest sequence


def load_model(spec: str, *, init: str = "factory", call: str | None = None) -> nn.Module:
    """Build the model that `spec` names, on the meta device.

    `init`, for `file.py:callable`: `factory` lets `shard` give the model the values of its own code; `modules` those of each
    module's rule, shard by shard. `call`: `file.py:callable`, a function (model, batch) -> logits.
    """
    is_file = spec not in PRESETS and ":" in spec and not _exists(spec)
    if init not in INITS or (init != "factory" and not is_file):
        more = "has no effect; leave it out" if init in INITS else f"is unknown; write {' or '.join(INITS)}"
        raise FullshardError(f"model.init = {init!r} {more}: only models of file.py:callable are built by code of their own")
    model = _from_file(spec, init) if is_file else _build(spec, _builder(spec))
    if call is not None:
        set_call(model, cast(ModelCall, load_callable(call, "logits, from a model and a batch")))
    return model


def _from_file(spec: str, init: str) -> nn.Module:
    factory = Factory(load_callable(spec, "a module"), spec)
    if init == "modules":
        return _build(spec, factory.call)
    model = factory.on_meta()
    keep_factory(model, factory)
    return model


def _builder(spec: str) -> Callable[[], object]:
    if spec in PRESETS:
        return lambda: built_in.build(spec)
    if spec.endswith(".py"):
        raise FullshardError(
            f"{spec} is a Python file; write {spec}:callable, the name of a function in it that returns a module"
        )
    if _exists(spec):
        return _hugging_face(Path(spec))
    raise unknown_model(spec)


def _build(spec: str, build: Callable[[], object]) -> nn.Module:
    try:
        with torch.device("meta"):
            model = build()
    except FullshardError:
        raise
    except Exception as error:
        hint = "; an NNX model, whose callable takes rngs, needs --engine jax" if "rngs" in str(error) else ""
        raise FullshardError(f"{spec} could not be built: {type(error).__name__}: {first_line(error)}{hint}") from error
    if not isinstance(model, nn.Module):
        raise FullshardError(f"{spec} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _exists(path: str) -> bool:
    return is_directory(path) or is_plain_file(path)


def _hugging_face(path: Path) -> Callable[[], object]:
    config_path = config_file(path)
    try:
        return model_builder(config_path)
    except FullshardError:
        raise
    except Exception as error:
        raise FullshardError(f"{config_path} is not a Hugging Face config: {first_line(error)}") from error


def model_facts(model: nn.Module) -> ModelFacts:
    """What the model's config says. A PEFT model has the config of the model that it wraps."""
    config, takes = getattr(model, "config", None), takes_positions(model)
    if config is None:
        size = getattr(model, "size", None)
        return ModelFacts(getattr(size, "vocab", None), getattr(size, "sequence", None), takes_positions=takes)
    lengths = [n for key in LENGTHS if isinstance(n := getattr(config, key, None), int)]
    classes = getattr(config, "num_labels", None) if _classifies(model) else None
    size = getattr(config, "image_size", None)
    side = size[0] if isinstance(size, list | tuple) and size else size if isinstance(size, int) else None
    return ModelFacts(getattr(config, "vocab_size", None), next(iter(lengths), None), classes, side, takes)


def _classifies(model: nn.Module) -> bool:
    """True for a Hugging Face classifier. Every config has num_labels, but only these have such a head."""
    return "Classification" in type(model).__name__


def takes_positions(model: nn.Module) -> bool:
    """True if the model's forward takes `position_ids`. For a PEFT model, looks at the wrapped model."""
    return "position_ids" in inspect.signature(without_adapters(model).forward).parameters
