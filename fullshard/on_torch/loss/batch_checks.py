"""Checks of a batch: type and shape at every step, token values at the first.

Some checks apply to the built-in losses only: a custom loss may take other tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.base.errors import FullshardError, a_kind
from fullshard.on_torch.loss.losses import IGNORED, LossFunction, TensorBatch
from fullshard.on_torch.loss.objective_losses import CAUSAL_LOSSES, LOSSES, OBJECTIVE_LOSSES, class_loss, masked_loss
from fullshard.on_torch.model.lora import without_adapters
from fullshard.on_torch.model.model_head import class_name, no_head, objective_of, transformers_classes
from fullshard.on_torch.tensors.batch_tree import row_count, shapes
from fullshard.plan.plan import Plan

IDS, LABELS = (torch.int64, torch.int32), (torch.int64,)
MIN_HIDDEN = 16  # tokens to find; of fewer, all may be left in the input by chance
MIN_CHANGES = 4  # positions where the next token differs; with fewer, equal labels may be correct


def refuse_batches(batches: list[Any], plan: Plan, loss: LossFunction) -> None:
    """Raise unless these are the micro-batches that the plan's step takes."""
    planned = plan.batch
    if len(batches) != planned.accumulate:
        raise FullshardError(f"the plan accumulates {planned.accumulate} micro-batches a step, but {len(batches)} were given")
    for batch in batches:
        if loss in OBJECTIVE_LOSSES:
            _refuse_labels(batch, loss)
        if loss in CAUSAL_LOSSES:
            _refuse_tokens(batch, plan)
        elif (rows := row_count(batch)) is not None and rows > planned.micro_batch:
            raise FullshardError(
                f"a batch of {rows} rows ({_shapes(batch)}) does not fit the plan's {planned.micro_batch}; change its batch"
            )


def _shapes(batch: Any) -> str:
    return ", ".join(f"{path or 'tensor'} {' × '.join(map(str, shape))}" for path, shape in shapes(batch).items())


def _refuse_tokens(batch: Any, plan: Plan) -> None:
    if not isinstance(batch, Mapping) or "input_ids" not in batch or "labels" not in batch:
        found = ", ".join(batch) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise FullshardError(
            f"a batch needs input_ids and labels; this one has {found or 'nothing'}; for other batches give loss=function"
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            what = "is None; leave the key out" if value is None else f"cannot be made a tensor (it is {a_kind(value)})"
            raise FullshardError(f"{key} of a batch {what}, or give it a tensor")
    if batch["input_ids"].ndim < 2:
        raise FullshardError(
            f"input_ids is {_shape(batch['input_ids'])}, without rows of tokens; write input_ids.view(rows, length)"
        )
    (rows, length), planned = batch["input_ids"].shape[:2], plan.batch
    if rows > planned.micro_batch or length > planned.sequence:
        raise FullshardError(
            f"a batch of {rows} × {length} tokens does not fit the plan's {planned.micro_batch} × {planned.sequence}; "
            "change the plan's batch"
        )
    _refuse_token_types(dict(batch))


def _refuse_token_types(batch: TensorBatch) -> None:
    for key, known in (("input_ids", IDS), ("labels", LABELS)):
        if batch[key].dtype not in known:
            raise FullshardError(
                f"{key} of a batch is {str(batch[key].dtype)[6:]}, but tokens are whole numbers; write {key}.long()"
            )
    if batch["labels"].shape != batch["input_ids"].shape:
        raise FullshardError(
            f"labels is {_shape(batch['labels'])} and input_ids {_shape(batch['input_ids'])}; give each token its label, "
            "ids[:, :-1] and ids[:, 1:]"
        )


def _refuse_labels(batch: Any, loss: LossFunction) -> None:
    """Raise unless the batch has the keys of a model with another objective than the next token."""
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)} if isinstance(batch, Mapping) else {}
    needed = ("labels",) if loss is class_loss else ("input_ids", "labels")
    if not all(key in tensors for key in needed) or len(tensors) < 2:
        found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else a_kind(batch)
        raise FullshardError(
            f"a batch of {loss.__name__} needs the model's inputs and labels, as tensors; this one has {found or 'nothing'}"
        )
    for key, known in (("input_ids", IDS), ("labels", LABELS)):
        if key in tensors and tensors[key].dtype not in known:
            what = "classes" if loss is class_loss and key == "labels" else "tokens"
            raise FullshardError(
                f"{key} of a batch is {str(tensors[key].dtype)[6:]}, but {what} are whole numbers; write {key}.long()"
            )
    if loss is masked_loss and tensors["labels"].shape != tensors["input_ids"].shape:
        raise FullshardError(
            f"labels is {_shape(tensors['labels'])} and input_ids {_shape(tensors['input_ids'])}; give each token its label, "
            "-100 where nothing is hidden"
        )


def _shape(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "a number"


# -- at the first step --------------------------------------------------------------------------------------


def first_batch_fault(model: nn.Module, batches: list[Any], loss: LossFunction) -> str | None:
    """The sentence about wrong tokens in this rank's first batches, or None. Waits for the device."""
    if fault := objective_fault(model, loss):
        return fault
    if loss in OBJECTIVE_LOSSES:
        beyond = _beyond_classes(model, batches) if loss is class_loss else None
        return beyond or _beyond_vocabulary(model, batches, loss) or (_unmasked(batches) if loss is masked_loss else None)
    if loss not in CAUSAL_LOSSES:
        return None
    return _beyond_vocabulary(model, batches, loss) or _unshifted(batches)


def objective_fault(model: nn.Module, loss: LossFunction) -> str | None:
    """The sentence about a loss that is for models of another objective, or None."""
    known = transformers_classes(model)
    if not known or loss not in (*CAUSAL_LOSSES, *OBJECTIVE_LOSSES):
        return None
    found, name = objective_of(model), class_name(model)
    if found is None:
        return no_head(model, f"{loss.__name__} is for")
    if loss is LOSSES[found] or (found == "causal" and loss in CAUSAL_LOSSES):
        return None
    own = f"write train_step(state, batches, loss=on_torch.{LOSSES[found].__name__})"
    if loss in CAUSAL_LOSSES and found in ("masked", "seq2seq"):
        what = "sees the whole text" if found == "masked" else "writes one text from another"
        return f"{name} {what}, so that a loss on next tokens would show it the answers; {own}"
    return f"{loss.__name__} is not the loss of {name}, whose objective is {found!r}; {own}"


def _beyond_vocabulary(model: nn.Module, batches: list[TensorBatch], loss: LossFunction) -> str | None:
    """Find tokens outside the vocabulary. On a GPU they end the process with an assertion that does not name the cause."""
    sizes = {"input_ids": _input_size(model), "labels": None if loss is class_loss else _output_size(model)}
    for key, size in [(key, size) for key, size in sizes.items() if size is not None]:
        for batch in (b for b in batches if key in b):
            tokens = batch[key][batch[key] != IGNORED] if key == "labels" else batch[key]
            low, high = (int(t) for t in tokens.aminmax()) if tokens.numel() else (0, 0)
            if low < 0 or high >= size:
                return (
                    f"{key} holds token {high if high >= size else low}, but the model has {size} (0 to {size - 1}); tokenize "
                    "the data with the model's own tokenizer, or make the model's vocabulary larger"
                )
    return None


def _input_size(model: nn.Module) -> int | None:
    """The size of the input vocabulary: the model's input embedding, else its largest embedding."""
    named = model.get_input_embeddings() if callable(getattr(model, "get_input_embeddings", None)) else None  # type: ignore[operator]
    if isinstance(named, nn.Embedding):
        return named.num_embeddings
    return max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=None)


def _output_size(model: nn.Module) -> int | None:
    """The size of the output vocabulary; None if the model's head is not found."""
    named = model.get_output_embeddings() if callable(getattr(model, "get_output_embeddings", None)) else None  # type: ignore[operator]
    head = named if named is not None else getattr(model, "lm_head", None)
    return head.out_features if isinstance(head, nn.Linear) else None


def _unshifted(batches: list[TensorBatch]) -> str | None:
    """Find labels that equal the inputs instead of the next tokens."""
    changes = 0
    for batch in batches:
        ids, labels = batch["input_ids"], batch["labels"]
        counts = labels != IGNORED
        if bool((counts & (labels != ids)).any()):
            return None
        changes += int((counts[:, :-1] & (ids[:, 1:] != ids[:, :-1])).sum())
    if changes < MIN_CHANGES:  # too few tokens, or one token repeated
        return None
    return (
        "labels equal input_ids, so that the model would learn to repeat its input: labels[t] is the token after input_ids[t]; "
        "write {'input_ids': ids[:, :-1], 'labels': ids[:, 1:]}"
    )


def _beyond_classes(model: nn.Module, batches: list[TensorBatch]) -> str | None:
    """Find labels that are no class of the model, and models that predict numbers."""
    config = getattr(without_adapters(model), "config", None)
    size: Any = getattr(config, "num_labels", None)
    kind = getattr(config, "problem_type", None)
    if size == 1 or kind not in (None, "single_label_classification"):
        shown = f"problem_type = {kind!r}" if kind else "num_labels = 1"
        return f"{class_name(model)} has {shown}, so it does not predict one class of several; give a loss of your own"
    for batch in batches if isinstance(size, int) else ():
        labels = batch["labels"][batch["labels"] != IGNORED]
        low, high = (int(t) for t in labels.aminmax()) if labels.numel() else (0, 0)
        if low < 0 or high >= size:
            return (
                f"labels holds class {high if high >= size else low}, but the model has {size} (0 to {size - 1}); write "
                "num_labels, the number of classes, in its config.json, or -100 for rows that do not count"
            )
    return None


def _unmasked(batches: list[TensorBatch]) -> str | None:
    """Find batches that hide nothing: every token to find is in the input."""
    counted = 0
    for batch in batches:
        counts = batch["labels"] != IGNORED
        if bool((counts & (batch["labels"] != batch["input_ids"])).any()):
            return None
        counted += int(counts.sum())
    if counted < MIN_HIDDEN:
        return None
    return (
        "labels equal input_ids wherever they count, so that the model would learn to repeat its input; write the mask token "
        "into input_ids where labels are not -100"
    )
