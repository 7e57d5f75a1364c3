"""Find the model that a name means, without memory for its weights.

The name is a preset (`llama3-8b`), a Hugging Face `config.json` or its directory, or `file.py:callable` /
`package.module:callable` for a function of `nnx.Rngs` that returns an NNX module.
"""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flax import nnx

from fullshard.base.callables import load_callable
from fullshard.base.errors import FullshardError, first_line
from fullshard.base.reading import is_directory, is_plain_file
from fullshard.engine.model import ModelFacts, ParameterFacts
from fullshard.model.hf_directory import config_file, unknown_model
from fullshard.model.presets import PRESETS, GPTSize, LlamaSize
from fullshard.on_jax.model.built_in import NnxGPT, NnxGPT2, NnxGPT2Size, NnxLlama
from fullshard.on_jax.model.describe import Factory, abstract
from fullshard.on_jax.model.loading.hf_config import read_size
from fullshard.on_jax.model.model_call import ModelCall, accepts, set_call
from fullshard.on_jax.model.module_tree import named_parameters, parameter_names
from fullshard.on_jax.model.read_weights import WeightFiles
from fullshard.on_jax.model.scanned_layers import find_stacks, stack_blocks
from fullshard.on_jax.tensors.dtypes import plan_dtype_name

LENGTHS = ("max_position_embeddings", "block_size", "max_seq_len", "sequence")  # what sizes call the longest sequence


@dataclass(frozen=True, eq=False)
class NnxFactory:
    """Makes a model: a function of `nnx.Rngs`. `title`: how messages call it. `call`: the function (model, batch) -> logits
    that its models are called through, if not by the batch's keys. `scan`: whether `shard` makes its equal blocks a loop."""

    make: Factory
    title: str = ""
    call: ModelCall | None = None
    scan: bool = False

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        with redirect_stdout(sys.stderr):  # what a model's code prints is no result of a command
            model = self.make(rngs)
        if self.call is not None and isinstance(model, nnx.Module):
            set_call(model, self.call)
        return model

    @cached_property
    def model(self) -> nnx.Module:
        """The model with shapes in place of values. It is shared: change nothing in it."""
        try:
            return abstract(self)
        except FullshardError as error:
            raise FullshardError(f"{self.title}: {error}") from None
        except Exception as error:
            said = f"{self.title} could not be built: {type(error).__name__}: {first_line(error)}"
            hint = "; on JAX the callable takes nnx.Rngs, and a torch model needs --engine torch"
            raise FullshardError(said + (hint if isinstance(error, TypeError) else "")) from error

    @property
    def vocabulary(self) -> int | None:
        return model_facts(self).vocabulary

    @property
    def longest(self) -> int | None:
        """The longest sequence that it was made for."""
        return model_facts(self).longest


def load_model(name: str, *, init: str = "factory", call: str | None = None, scan: bool = False) -> NnxFactory:
    """The model that `name` means. `call`: `file.py:callable`, a function (model, batch) -> logits. `scan`: `shard` compiles its
    equal blocks once, as a loop."""
    if init != "factory":
        raise FullshardError(
            f"model.init = {init!r}: on JAX the model's own code sets its initial values, shard by shard; leave init out"
        )
    own = None if call is None else load_callable(call, "logits, from a model and a batch")
    found = NnxFactory(_maker(name), name, own)
    found.model  # noqa: B018 - a model that cannot be built is refused here
    return scanned(found) if scan else found


def _maker(name: str) -> Factory:
    if name in PRESETS:
        return _of_size(PRESETS[name])
    if _exists(name):
        return _hugging_face(Path(name))
    if ":" in name:
        return load_callable(name, "a flax.nnx.Module, from nnx.Rngs")
    if name.endswith(".py"):
        raise FullshardError(
            f"{name} is a Python file; write {name}:callable, the name of a function of nnx.Rngs that returns a flax.nnx.Module"
        )
    raise unknown_model(name)


def _exists(path: str) -> bool:
    return is_directory(path) or (is_plain_file(path) and not path.endswith(".py"))


def _hugging_face(path: Path) -> Factory:
    return _of_size(read_size(config_file(path)))


def _of_size(size: LlamaSize | GPTSize | NnxGPT2Size) -> Factory:
    kind: Callable[..., nnx.Module] = (
        NnxLlama if isinstance(size, LlamaSize) else NnxGPT2 if isinstance(size, NnxGPT2Size) else NnxGPT
    )
    return lambda rngs: kind(size, rngs=rngs)


# -- what a run asks of a model ------------------------------------------------------------------------------------


def model_facts(model: Factory) -> ModelFacts:
    """What the model's `size` or `config` says. No model that JAX loads by name is a classifier."""
    made: Any = built(model)
    size = getattr(made, "config", None) or getattr(made, "size", None)
    count = lambda keys: next((n for key in keys if type(n := getattr(size, key, None)) is int), None)
    return ModelFacts(count(("vocab_size", "vocab")), count(LENGTHS), takes_positions=accepts(made, "position_ids"))


def parameters(model: Factory) -> list[ParameterFacts]:
    """All of them are trained."""
    named = named_parameters(built(model))
    return [ParameterFacts(name, tuple(p.shape), plan_dtype_name(name, p.dtype), True) for name, p in named.items()]


def check_weights(model: Factory, directory: str | Path) -> None:
    """Raise where the directory's tensors are not the model's, by name and shape."""
    made = built(model)
    shapes = {name: tuple(p.shape) for name, p in named_parameters(made).items()}
    WeightFiles(Path(directory), shapes, parameter_names(made).values())


def built(model: Factory) -> nnx.Module:
    """The model with shapes in place of values."""
    return model.model if isinstance(model, NnxFactory) else abstract(model)


def called(model: Factory) -> nnx.Module:
    """The model as a step calls it, with shapes in place of values."""
    if not scans(model):
        return built(model)
    made = abstract(model)
    stack_blocks(made, find_stacks(made))
    return made


def scanned(model: Factory) -> NnxFactory:
    """The same model, of which `shard` makes equal blocks a loop. Raises where it has none."""
    made = built(model)
    find_stacks(made)
    found = replace(model, scan=True) if isinstance(model, NnxFactory) else NnxFactory(model, scan=True)
    vars(found)["model"] = made  # known already
    return found


def scans(model: Factory) -> bool:
    """Whether equal blocks of the model become a loop."""
    return isinstance(model, NnxFactory) and model.scan
