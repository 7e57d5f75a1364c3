"""The losses of a language model on JAX. A loss function takes the model and a batch, and returns a `Loss`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fullshard.base.errors import FullshardError, a_kind
from fullshard.engine.loss_value import Loss as Loss
from fullshard.on_jax.model.chunked_cross_entropy import IGNORED, cross_entropy
from fullshard.on_jax.model.model_call import logits, own_call

RETURN = "return on_jax.Loss(sum, count): the sum over rows, tokens or pixels, and their number"

LossFunction = Callable[[Any, Any], Loss | jax.Array]


def summed_loss(model: Any, batch: Mapping[str, jax.Array]) -> Loss:
    """Cross-entropy, summed over all labels that are not -100. `labels[t]` is the token that follows `input_ids[t]`; all other
    keys are passed to the model."""
    if isinstance(found := logits(model, batch), Loss):
        raise FullshardError("model.call returns a Loss of its own; give train_step loss=on_jax.called_loss")
    return _of_logits(found, batch["labels"])


def called_loss(model: Any, batch: Mapping[str, jax.Array]) -> Loss:
    """The loss of a model with a call of its own: the `Loss` that the call returns, or the cross-entropy of its logits."""
    found = logits(model, batch)
    return found if isinstance(found, Loss) else _of_logits(found, batch["labels"])


def _of_logits(found: Any, labels: jax.Array) -> Loss:
    if not isinstance(found, jax.Array) or found.ndim < 3 or found.shape[:2] != labels.shape[:2]:
        shown = f"an array of shape {list(found.shape)}" if isinstance(found, jax.Array) else a_kind(found)
        raise FullshardError(
            f"the model's call returned {shown} for labels of shape {list(labels.shape)}; return logits of shape (rows, tokens, "
            "vocabulary), or on_jax.Loss(sum, count) with loss=on_jax.called_loss"
        )
    return Loss(cross_entropy(found.astype(jnp.float32), labels), (labels != IGNORED).sum())


def chunked_loss(model: Any, batch: Mapping[str, jax.Array]) -> Loss:
    """As `summed_loss`, for models whose call takes `labels` and returns their summed loss, without ever holding all logits."""
    if own_call(model):
        raise FullshardError("chunked loss: the model has a call of its own, whose logits may differ from the head's; use plain")
    others = {k: v for k, v in batch.items() if k != "input_ids"}
    return Loss(model(batch["input_ids"], **others), (batch["labels"] != IGNORED).sum())


def as_loss(value: object, batch: Any) -> Loss:
    """The result of a loss function, checked. A bare array is a sum over the batch's labels that are not -100."""
    if not isinstance(value, Loss):
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(value, jax.Array) or labels is None:
            raise FullshardError(f"the loss function returned {a_kind(value)}; {RETURN}")
        value = Loss(value, (labels != IGNORED).sum())
    if getattr(value.sum, "shape", None) != () or not jnp.issubdtype(value.sum.dtype, jnp.floating):
        raise FullshardError(f"the loss function returned a sum of shape {list(jnp.shape(value.sum))}, not one number; {RETURN}")
    pair = lambda metric: metric if isinstance(metric, tuple) else (metric, value.count)
    number = lambda x: jnp.asarray(x, jnp.float32)
    metrics = {name: tuple(number(x) for x in pair(metric)) for name, metric in value.metrics.items()}
    return Loss(value.sum.astype(jnp.float32), number(value.count), metrics, value.across_rows)
