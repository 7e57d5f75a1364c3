"""How a language model on NNX is called: from a batch of tokens to logits.

The batch's keys are the arguments, unless the model was given a function `(model, batch) -> logits` of its own.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
from flax import nnx

from fullshard.base.errors import FullshardError, a_kind

ModelCall = Callable[[Any, Any], Any]  # (model, batch) -> logits, or a Loss


def set_call(model: nnx.Module, call: ModelCall) -> None:
    """Call the model through this function from now on."""
    model.fullshard_model_call = call  # type: ignore[attr-defined]


def own_call(model: nnx.Module) -> ModelCall | None:
    """The function that the model is called through, if it was given one."""
    return cast(ModelCall | None, getattr(model, "fullshard_model_call", None))


def logits(model: nnx.Module, batch: Mapping[str, jax.Array]) -> Any:
    """The logits of all positions; or what the model's own call returns."""
    if call := own_call(model):
        return call(model, batch)
    others = {k: v for k, v in batch.items() if k not in ("input_ids", "labels")}
    return cast(Any, model)(batch["input_ids"], **others)


def logits_at(model: nnx.Module, ids_BT: jax.Array, index: jax.Array) -> jax.Array:
    """The logits of one position, of shape (rows, vocabulary). Models with an argument `logits_at` compute no others."""
    if own_call(model) is None and accepts(model, "logits_at"):
        return cast(Any, model)(ids_BT, logits_at=index)[:, 0]
    found = logits(model, {"input_ids": ids_BT, "labels": ids_BT})
    if not isinstance(found, jax.Array) or found.ndim != 3 or found.shape[:2] != ids_BT.shape:
        what = "model.call" if own_call(model) else type(model).__name__
        shown = f"an array of shape {list(found.shape)}" if isinstance(found, jax.Array) else a_kind(found)
        raise FullshardError(f"{what} returns {shown}, no logits to sample from; return logits, or leave sample out")
    return jax.lax.dynamic_index_in_dim(found, index, 1, keepdims=False)


def accepts(model: nnx.Module, argument: str) -> bool:
    """Whether the model's call has this argument by name."""
    return argument in inspect.signature(type(model).__call__).parameters
