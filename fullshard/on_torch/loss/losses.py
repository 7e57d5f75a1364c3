"""What a loss function returns, and the loss of a language model.

A loss function takes the model and a batch, any tree of tensors, and returns a `Loss`: a sum and what it counts. The
step divides by the count of all ranks and micro-batches, so every row weighs the same wherever it is computed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.base.errors import FullshardError, a_kind
from fullshard.engine.loss_value import Loss as Loss
from fullshard.on_torch.model.model_call import logits

IGNORED = -100
RETURN = "return on_torch.Loss(sum, count): the sum over rows, tokens or pixels, and their number"

TensorBatch = dict[str, Tensor]  # of a language model
LossFunction = Callable[[nn.Module, Any], Loss | Tensor]


def summed_loss(model: nn.Module, batch: TensorBatch) -> Tensor:
    """The loss of a language model: cross-entropy, summed over all labels that are not -100.

    The batch is a dict with `input_ids` and `labels`, both of shape (micro_batch, sequence). `labels[t]` is the token that
    follows `input_ids[t]`, or -100 for no loss. All other keys are passed to the model.
    """
    found = called_loss(model, batch)
    if isinstance(found, Loss):
        raise FullshardError("model.call returns a Loss of its own; give train_step and evaluate loss=on_torch.called_loss")
    return found


def called_loss(model: nn.Module, batch: TensorBatch) -> Loss | Tensor:
    """The loss of a model with a call of its own: the `Loss` that the call returns, or the cross-entropy of its logits."""
    found = logits(model, batch)
    if isinstance(found, Loss):
        return found
    if not isinstance(found, Tensor) or found.ndim < 3 or found.shape[:2] != batch["labels"].shape[:2]:
        shown = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else a_kind(found)
        raise FullshardError(
            f"model.call returned {shown} for labels of shape {list(batch['labels'].shape)}; return logits of shape (rows, "
            "tokens, vocabulary), or on_torch.Loss(sum, count)"
        )
    return F.cross_entropy(found.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


# -- what a loss function returned ---------------------------------------------------------------------------


def as_loss(value: object, batch: Any, device: torch.device) -> Loss:
    """The result of a loss function, checked. A bare tensor is a sum over the batch's labels that are not -100."""
    found = value if isinstance(value, Loss) else _of_labels(value, batch)
    if not isinstance(found.sum, Tensor) or found.sum.numel() != 1 or not found.sum.is_floating_point():
        shown = f"a tensor of shape {list(found.sum.shape)}" if isinstance(found.sum, Tensor) else a_kind(found.sum)
        raise FullshardError(f"the loss function returned {shown}, not one number with a gradient; {RETURN}")
    metrics = {name: _pair(name, metric, found.count, device) for name, metric in found.metrics.items()}
    return Loss(found.sum.reshape(()), _number("count", found.count, device), metrics, found.across_rows)


def _of_labels(value: object, batch: Any) -> Loss:
    if not isinstance(value, Tensor):
        raise FullshardError(f"the loss function returned {a_kind(value)}; {RETURN}")
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        raise FullshardError(f"the loss function returned a tensor, and the batch has no labels to count; {RETURN}")
    return Loss(value, label_count(labels))


def label_count(labels: Tensor) -> Tensor:
    """The number of labels that count, as a tensor, without waiting for the device."""
    return (labels != IGNORED).sum().double()


def _pair(name: str, metric: object, count: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    total, own = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric, count)
    return _number(f"metrics[{name!r}]", total, device), _number(f"metrics[{name!r}]", own, device)


def _number(name: str, value: object, device: torch.device) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(()).double().to(device, non_blocking=True)
    if isinstance(value, int | float):
        return torch.tensor(float(value), dtype=torch.float64).to(device, non_blocking=True)
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else a_kind(value)
    raise FullshardError(f"{name} of the Loss is {shown}, not one number; {RETURN}")
