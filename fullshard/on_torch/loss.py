"""The loss of a language model on one batch.

A batch is a dict with `input_ids` and `labels`, both of shape (micro_batch, sequence). `labels[t]` is the token that
follows `input_ids[t]`, or -100 for no loss. All other keys are passed to the model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.on_torch.generate import logits_of

IGNORED = -100

TensorBatch = dict[str, Tensor]
HostBatch = Mapping[str, Any]  # values: anything that torch.as_tensor takes
LossFunction = Callable[[nn.Module, TensorBatch], Tensor]


def summed_loss(model: nn.Module, batch: TensorBatch) -> Tensor:
    """Cross-entropy, summed over all labels that are not -100.

    A custom loss function must return a sum too: the step divides by the number of labels on all ranks.
    """
    logits_BTV = logits_of(model(batch["input_ids"], **extra_inputs(model, batch)))
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def extra_inputs(model: nn.Module, batch: TensorBatch) -> dict[str, Any]:
    """Keyword arguments for the model's forward. Turns the cache of a Hugging Face model off: with a cache it ignores
    document boundaries in `position_ids`."""
    extra: dict[str, Any] = {k: v for k, v in batch.items() if k not in ("input_ids", "labels")}
    return extra | ({"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {})
