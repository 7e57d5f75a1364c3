"""Checks of a batch: type and shape at every step, token values at the first.

Some checks apply to the built-in losses only: a custom loss may take other tensors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fullshard.errors import FullshardError, a_kind
from fullshard.on_torch.loss import IGNORED, HostBatch, LossFunction, TensorBatch, summed_loss
from fullshard.on_torch.loss_chunks import chunked_loss
from fullshard.plan import Plan

BATCH = "a batch is a dict of tensors, {'input_ids': ids[:, :-1], 'labels': ids[:, 1:]}"
IDS, LABELS = (torch.int64, torch.int32), (torch.int64,)
MIN_CHANGES = 4  # positions where the next token differs; with fewer, equal labels may be correct


def on_device(batch: HostBatch, device: torch.device) -> TensorBatch:
    """Start copying the batch to the device; returns it as tensors there."""
    if not isinstance(batch, Mapping):
        raise FullshardError(f"{BATCH}, not {a_kind(batch)}; a step takes a list of them")
    return {key: _tensor(key, value).to(device, non_blocking=True) for key, value in batch.items()}


def _tensor(key: str, value: object) -> Tensor:
    if value is None:
        raise FullshardError(f"{key} of a batch is None; leave the key out, or give it a tensor")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise FullshardError(f"{key} of a batch cannot be made a tensor ({why}); {BATCH}") from None


def refuse_batches(batches: list[TensorBatch], plan: Plan, loss: LossFunction) -> None:
    """Raise unless these are the micro-batches that the plan's step takes."""
    planned = plan.batch
    if len(batches) != planned.accumulate:
        raise FullshardError(f"the plan accumulates {planned.accumulate} micro-batches a step, but {len(batches)} were given")
    for batch in batches:
        if "input_ids" not in batch or "labels" not in batch:
            raise FullshardError(f"a batch needs input_ids and labels; this one has {', '.join(batch) or 'nothing'}")
        if batch["input_ids"].ndim < 2:
            raise FullshardError(
                f"input_ids is {_shape(batch['input_ids'])}, without rows of tokens; write input_ids.view(rows, length)"
            )
        rows, length = batch["input_ids"].shape[:2]
        if rows != planned.micro_batch or length > planned.sequence:
            raise FullshardError(
                f"a batch of {rows} × {length} tokens does not fit the plan's {planned.micro_batch} × {planned.sequence}; "
                "change the plan's batch"
            )
        if loss in (summed_loss, chunked_loss):
            _refuse_tokens(batch)


def _refuse_tokens(batch: TensorBatch) -> None:
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


def _shape(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "a number"


# -- at the first step --------------------------------------------------------------------------------------


def first_batch_fault(model: nn.Module, batches: list[TensorBatch], loss: LossFunction) -> str | None:
    """The sentence about wrong tokens in this rank's first batches, or None. Waits for the device."""
    if loss not in (summed_loss, chunked_loss):
        return None
    return _beyond_vocabulary(model, batches) or _unshifted(batches)


def _beyond_vocabulary(model: nn.Module, batches: list[TensorBatch]) -> str | None:
    """Find tokens outside the vocabulary. On a GPU they end the process with an assertion that does not name the cause."""
    sizes = {"input_ids": _input_size(model), "labels": _output_size(model)}
    for key, size in [(key, size) for key, size in sizes.items() if size is not None]:
        for batch in batches:
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
