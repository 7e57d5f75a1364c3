"""The loss of a language model on one batch.

A batch is a dict with `input_ids` and `labels`, both (micro_batch, sequence): `labels[t]` is the token
that follows `input_ids[t]`, or -100 where no loss is wanted. Any further key is passed to the model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.on_torch.generate import logits_of

IGNORED = -100

Batch = dict[str, Tensor]
HostBatch = Mapping[str, Any]  # tensors, or numpy arrays: anything torch.as_tensor takes
LossFunction = Callable[[nn.Module, Batch], Tensor]


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy summed over the labels that count. A loss function of your own must be a sum as well:
    the step divides by the number of tokens in the whole step, on all ranks."""
    logits_BTV = logits_of(model(batch["input_ids"], **extra_inputs(model, batch)))
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def extra_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """What the model is given besides the ids. A Hugging Face model is told to keep no cache: with one it
    would not look for the documents in `position_ids`."""
    extra: dict[str, Any] = {k: v for k, v in batch.items() if k not in ("input_ids", "labels")}
    return extra | ({"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {})
