"""Build a model on the meta device from a name.

The name is a preset (`llama3-8b`), a Hugging Face `config.json` or its directory, or `file.py:callable` /
`package.module:callable` for a callable that returns a module.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from fullshard.errors import FullshardError, first_line, nearest
from fullshard.model.presets import PRESETS
from fullshard.on_torch import models
from fullshard.on_torch.hf_config import model_builder
from fullshard.reading import is_directory, is_plain_file


def load_model(spec: str) -> nn.Module:
    """Build the model that `spec` names, on the meta device."""
    if spec in PRESETS:
        build: Callable[[], object] = lambda: models.build(spec)
    elif ":" in spec and not _exists(spec):
        build = _callable(spec)
    elif spec.endswith(".py"):
        raise FullshardError(
            f"{spec} is a Python file; write {spec}:callable, the name of a function in it that returns a module"
        )
    elif _exists(spec):
        build = _hugging_face(Path(spec))
    else:
        known = f"a preset ({', '.join(PRESETS)}), a directory with a config.json, or file.py:callable"
        raise FullshardError(f"unknown model {spec!r}; write {known}{nearest(spec, list(PRESETS))}")
    try:
        with torch.device("meta"):
            model = build()
    except FullshardError:
        raise
    except Exception as error:
        raise FullshardError(f"{spec} could not be built: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise FullshardError(f"{spec} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _exists(path: str) -> bool:
    return is_directory(path) or is_plain_file(path)


def _callable(spec: str) -> Callable[[], object]:
    where, _, name = spec.rpartition(":")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where, spec)
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise FullshardError(f"{where} has no {name!r}{nearest(name, public)} (it has {', '.join(public) or 'no callables'})")
    found = getattr(module, name)
    if not callable(found):
        raise FullshardError(f"{spec} is of type {type(found).__name__}; write the name of a callable that returns a module")
    return found


def _import_file(path: Path) -> ModuleType:
    if not is_plain_file(path):
        raise FullshardError(f"there is no file {path}; write path/to/file.py:callable")
    name = f"_fullshard_{path.stem}"  # a file called json.py must not replace the json module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise FullshardError(f"cannot import {path}: {type(error).__name__}: {first_line(error)}") from error
    return module


def _import_module(name: str, spec: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise FullshardError(
            f"cannot import {spec}: {first_line(error)}; write package.module:callable or path/to/file.py:callable"
        ) from error


def _hugging_face(path: Path) -> Callable[[], object]:
    config_path = path / "config.json" if is_directory(path) else path
    if not is_plain_file(config_path):
        raise FullshardError(f"{path} has no config.json; write the directory of a Hugging Face model")
    try:
        return model_builder(config_path)
    except FullshardError:
        raise
    except Exception as error:
        raise FullshardError(f"{config_path} is not a Hugging Face config: {first_line(error)}") from error


def limits(model: nn.Module) -> tuple[int | None, int | None]:
    """(vocabulary size, longest sequence) from the model's config; None for what it does not say."""
    config = getattr(model, "config", None)
    if config is not None:
        return getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    size = getattr(model, "size", None)
    return getattr(size, "vocab", None), getattr(size, "sequence", None)


def takes_positions(model: nn.Module) -> bool:
    """True if the model's forward takes `position_ids`. For a PEFT model, looks at the wrapped model."""
    inner = getattr(model, "base_model", model) if hasattr(model, "peft_config") else model
    inner = getattr(inner, "model", inner) if inner is not model else inner
    parameters = inspect.signature(inner.forward).parameters
    return "position_ids" in parameters
