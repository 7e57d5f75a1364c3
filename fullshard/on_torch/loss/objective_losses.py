"""The objective of a model, which is what its head predicts, and the loss of each objective.

Losses are sums over what counts, computed in fp32 from the logits. Labels are never passed to the model: its own loss
would be a mean, which depends on how rows are spread over ranks.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.on_torch.loss.chunked_loss import chunked_loss
from fullshard.on_torch.loss.losses import IGNORED, Loss, LossFunction, label_count, summed_loss
from fullshard.on_torch.model.lora import without_adapters
from fullshard.on_torch.model.model_head import Objective, class_name, no_head, objective_of


def loss_of(model: nn.Module) -> LossFunction:
    """The loss function of the model's objective."""
    found = objective_of(model)
    if found is None:
        raise FullshardError(no_head(model, "a loss is known for"))
    return LOSSES[found]


# -- losses --------------------------------------------------------------------------------------------------


def _logits(output: Any) -> Tensor:
    """The logits of a model's output: a tensor, or the `logits` of a Hugging Face output."""
    return output if isinstance(output, Tensor) else output.logits


def masked_loss(model: nn.Module, batch: Any) -> Loss:
    """The loss of a model that predicts hidden tokens: cross-entropy, summed over all labels that are not -100.

    The batch has `input_ids` with tokens hidden, and `labels` of the same shape with the tokens to find, or -100. All other
    keys are passed to the model. The metric `accuracy` is the share of tokens found.
    """
    return _cross_entropy(_logits(model(**_inputs(model, batch))), batch["labels"])


def seq2seq_loss(model: nn.Module, batch: Any) -> Loss:
    """The loss of a model from text to text: cross-entropy, summed over all labels that are not -100.

    The batch has `input_ids`, usually `attention_mask`, and `labels`, the text to write, not shifted. The model's own shift
    makes `decoder_input_ids` of the labels, unless the batch has them. The metric is `accuracy`.
    """
    inputs = _inputs(model, batch)
    if "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = _shifted(model, batch["labels"])
    return _cross_entropy(_logits(model(**inputs)), batch["labels"])


def class_loss(model: nn.Module, batch: Any) -> Loss:
    """The loss of a classifier of texts, tokens or images: cross-entropy, summed over all labels that are not -100.

    The batch has `labels`, one class for each row or each token; all other keys are passed to the model. The metric is
    `accuracy`.
    """
    return _cross_entropy(_logits(model(**_inputs(model, batch))), batch["labels"])


CAUSAL_LOSSES: tuple[LossFunction, ...] = (summed_loss, chunked_loss)
LOSSES: dict[Objective, LossFunction] = {
    "causal": summed_loss,
    "masked": masked_loss,
    "seq2seq": seq2seq_loss,
    "classify": class_loss,
    "image": class_loss,
}
OBJECTIVE_LOSSES: tuple[LossFunction, ...] = (masked_loss, seq2seq_loss, class_loss)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Loss:
    """Of logits with one more dim than the labels, the classes."""
    if logits.shape[:-1] != labels.shape:
        raise FullshardError(
            f"the model's logits are {list(logits.shape)}, but labels are {list(labels.shape)}; give one label for each of "
            f"{list(logits.shape[:-1])}"
        )
    flat, wanted = logits.flatten(0, -2).float(), labels.flatten()
    total = F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
    return Loss(total, label_count(labels), {"accuracy": (flat.detach().argmax(-1) == wanted).sum()})


def _inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for the model's forward. A cache would be filled for nothing."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    takes = inspect.signature(without_adapters(model).forward).parameters
    return inputs | ({"use_cache": False} if "use_cache" in takes else {})


def _shifted(model: nn.Module, labels: Tensor) -> Tensor:
    shift = getattr(without_adapters(model), "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        raise FullshardError(f"{class_name(model)} has no shift of its own; put decoder_input_ids into the batch")
    made: Tensor = shift(labels=labels)
    return made


# -- classes of transformers ---------------------------------------------------------------------------------
