"""Chunked cross-entropy: the logits and their gradient are computed for one chunk of tokens at a time.

The loss is a sum over tokens. So each chunk's gradient with respect to the head's input and weight can be computed in
forward, as soon as its logits are known; then the logits are freed. The number of matrix products is that of the plain
loss: nothing is recomputed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from fullshard.base.errors import FullshardError, first_line
from fullshard.on_torch.loss.losses import IGNORED, TensorBatch
from fullshard.on_torch.loss.softmax_loss import scaled, softmax_loss_
from fullshard.on_torch.model.model_call import call_model, computes_loss, find_logits, own_call
from fullshard.on_torch.private.torch_internals import all_reduce
from fullshard.on_torch.tensors.shard_ranges import local_box, local_tensor
from fullshard.planner.step.schedule import CHUNK_BUDGET, CHUNK_BYTES, CHUNK_TILE, SPLIT_CHUNK_BYTES

BUDGET, TILE = CHUNK_BUDGET, CHUNK_TILE
ALL = 1 << 60  # bytes of a chunk: more than there are
BYTES_PER_LOGIT, BYTES_PER_SPLIT_LOGIT = CHUNK_BYTES, SPLIT_CHUNK_BYTES


BY_TORCH = WeakSet[nn.Module]()  # models whose chunked loss uses no Triton kernel


class ChunkedLossError(FullshardError):
    """A model whose loss cannot be computed in chunks."""


def chunked_loss(model: nn.Module, batch: TensorBatch) -> Tensor:
    """Equal to `summed_loss`, but the memory for logits depends on neither the vocabulary nor the number of tokens."""
    head = output_head(model)
    if own_call(model):
        raise ChunkedLossError(
            "chunked loss: the model has a call of its own, whose logits may differ from the head's; use plain"
        )
    loss = HeadLoss(head, batch["labels"], computes_loss(model), model in BY_TORCH)
    head.forward = loss.forward  # type: ignore[assignment,method-assign]
    try:
        output = call_model(model, batch)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
        if loss.labels is not None or isinstance(error, torch.OutOfMemoryError):
            raise  # not because of what the head returned
        raise ChunkedLossError(
            f"chunked loss: {type(model).__name__} computes with its logits ({first_line(error)}); use summed_loss, in a recipe "
            "train.loss = 'plain'"
        ) from error
    finally:
        del head.forward
    if computes_loss(model):
        return find_logits(model, output, batch["input_ids"]).reshape(-1)[0]
    return _scalar(model, output)


def compute_by_torch(model: nn.Module) -> None:
    """Compute the chunked loss of this model without the Triton kernel."""
    BY_TORCH.add(model)


def _scalar(model: nn.Module, output: Any) -> Tensor:
    """What the head returned, in the model's output."""
    found = output if isinstance(output, Tensor | tuple | list | dict) else output.logits
    found = found.get("logits") if isinstance(found, dict) else found
    parts = found if isinstance(found, tuple | list) else [found]
    scalar = next((t for t in parts if isinstance(t, Tensor) and t.ndim == 0 and t.is_floating_point()), None)
    if scalar is None:
        raise ChunkedLossError(f"chunked loss: {type(model).__name__} does not return what its head computes; use summed_loss")
    return scalar


def output_head(model: nn.Module) -> nn.Linear:
    """The linear layer that computes the logits. Raises if there is none."""
    found = model.get_output_embeddings() if callable(getattr(model, "get_output_embeddings", None)) else None  # type: ignore[operator]
    for name in ("lm_head", "output"):
        found = found if found is not None else getattr(model, name, None)
    if not isinstance(found, nn.Linear):
        raise FullshardError(f"chunked loss: {type(model).__name__} has no linear head called lm_head or output; use summed_loss")
    return found


@dataclass
class HeadLoss:
    """Replaces a head's forward for one call, so that FSDP's hooks on the head still gather and free its weight. `spread`: the
    model computes a loss of its own. `by_torch`: without the Triton kernel."""

    head: nn.Linear
    labels: Tensor | None  # until the head has run
    spread: bool
    by_torch: bool

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """A model that computes a loss of its own gets the sum as the logits of a vocabulary of one: its loss of these costs
        nothing, and the sum goes through its output, where FSDP's hooks look for what needs a gradient."""
        head, labels = self.head, self.labels
        assert labels is not None
        if hidden_BTD.shape[:-1].numel() != labels.numel():
            raise ChunkedLossError(
                f"chunked loss: the head computes {hidden_BTD.shape[:-1].numel()} positions of {labels.numel()}; use a model "
                "that computes the logits of all, or model.call in a recipe"
            )
        self.labels = None
        if isinstance(head.weight, DTensor):
            return _split_cross_entropy(head, hidden_BTD, labels.flatten())
        flat = hidden_BTD.flatten(0, -2)
        loss = chunked_cross_entropy(flat, head.weight, labels.flatten(), head.bias, by_torch=self.by_torch)
        return loss.repeat(*hidden_BTD.shape[:-1], 1) if self.spread else loss


def _split_cross_entropy(head: nn.Linear, hidden_BTD: Tensor, labels_N: Tensor) -> Tensor:
    """The same of a head whose vocabulary is split over a tensor axis: no rank has the others' logits."""
    weight, mesh = head.weight, cast(DTensor, head.weight).device_mesh
    # Each rank's gradient of the hidden states is of its own logits: their sum is the gradient.
    hidden = hidden_BTD.to_local(grad_placements=[Partial()]) if isinstance(hidden_BTD, DTensor) else hidden_BTD
    local, bias = local_tensor(weight), None if head.bias is None else local_tensor(head.bias)
    part = VocabularyPart(local_box(weight)[0][0], mesh)
    chunk = _chunk_tokens(local.shape[0], None, BYTES_PER_SPLIT_LOGIT)
    loss = _ChunkedCrossEntropy.apply(hidden.flatten(0, 1), local, bias, labels_N, chunk, part, False)
    return DTensor.from_local(loss, mesh, [Replicate()], run_check=False)  # as torch's style of the head expects it


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of a split head that this rank has. `start`: the first token of them."""

    start: int
    mesh: DeviceMesh

    def largest(self, values: Tensor) -> Tensor:
        return all_reduce(values, "max", self.mesh)

    def summed(self, values: Tensor) -> Tensor:
        return all_reduce(values, "sum", self.mesh)


def chunked_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    bias_V: Tensor | None = None,
    *,
    budget: int | None = None,
    by_torch: bool = False,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction="sum")`, in chunks. `by_torch`: without the
    Triton kernel."""
    chunk = _chunk_tokens(weight_VD.shape[0], budget)
    return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, bias_V, labels_N, chunk, None, by_torch)


_trace: Callable[[], AbstractContextManager[None]] | None = None


@contextmanager
def traced_as_one_chunk(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, the loss of all tokens is one chunk, computed inside `around()`, and as a later one: the first need not add."""
    global _trace
    before, _trace = _trace, around
    try:
        yield
    finally:
        _trace = before


def _chunk_tokens(rows: int, budget: int | None, each: int = BYTES_PER_LOGIT) -> int:
    budget = (ALL if _trace else BUDGET) if budget is None else budget
    chunk = max(1, budget // (each * rows))
    return chunk - (chunk % TILE if chunk > TILE else 0)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        chunk: int,
        vocabulary: VocabularyPart | None,
        by_torch: bool,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        # Sums over chunks are in float32: in bf16 every chunk would add a rounding error. The first one begins the weight's.
        grads = [
            torch.empty_like(weight_VD, dtype=torch.float32) if wanted[1] else None,
            torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and wanted[2] else None,
        ]
        grad_hidden_ND = torch.empty_like(hidden_ND) if wanted[0] else None
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        for i in range(0, hidden_ND.shape[0], chunk):
            part = slice(i, i + chunk)
            with _trace() if _trace else nullcontext():
                found = _one_chunk(
                    hidden_ND[part],
                    weight_VD,
                    bias_V,
                    labels_N[part],
                    None if grad_hidden_ND is None else grad_hidden_ND[part],
                    grads[0],
                    grads[1],
                    vocabulary,
                    first=i == 0 and not _trace,
                    by_torch=by_torch,
                )
            loss += found
            del found
        ctx.save_for_backward(grad_hidden_ND, *grads)
        ctx.by_torch = by_torch
        ctx.dtypes = (weight_VD.dtype, bias_V.dtype if bias_V is not None else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = outputs
        hidden, *sums = ctx.saved_tensors
        # In float32: rounding the factor 1 / tokens to bf16 would bias all gradients by up to 0.4%.
        parts = zip(sums, ctx.dtypes, strict=True)
        weights = [None if g is None else _scaled(g, grad_output, d, ctx.by_torch) for g, d in parts]
        return (None if hidden is None else (hidden.float() * grad_output).to(hidden.dtype), *weights, None, None, None, None)


def _scaled(total: Tensor, factor: Tensor, dtype: torch.dtype, by_torch: bool) -> Tensor:
    return total.mul_(factor) if total.dtype is dtype else scaled(total, factor, dtype, by_torch)


def _one_chunk(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_C: Tensor,
    grad_hidden_CD: Tensor | None,
    grad_weight_VD: Tensor | None,
    grad_bias_V: Tensor | None,
    vocabulary: VocabularyPart | None = None,
    *,
    first: bool = False,
    by_torch: bool = False,
) -> Tensor:
    """The loss of one chunk. Writes the gradient of the input and adds the gradients of weight and bias, in place; the `first`
    chunk writes that of the weight, too."""
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V)
    if vocabulary is None:
        loss, grad_CV = softmax_loss_(logits_CV, labels_C, by_torch).sum(), logits_CV
    else:
        loss, grad_CV = _split_loss(logits_CV, labels_C, vocabulary)
    del logits_CV
    if grad_hidden_CD is not None:
        torch.mm(grad_CV, weight_VD, out=grad_hidden_CD)
    if grad_weight_VD is not None:
        (_write_product if first else _add_product)(grad_weight_VD, grad_CV.t(), hidden_CD)
    if grad_bias_V is not None:
        grad_bias_V.add_(grad_CV.sum(0, dtype=torch.float32))
    return loss


def _split_loss(logits_CV: Tensor, labels_C: Tensor, vocabulary: VocabularyPart) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, and the gradient of this rank's part of the logits."""
    counted_C = (labels_C != IGNORED).float()
    column_C = labels_C.clamp(min=0) - vocabulary.start
    here_C = ((column_C >= 0) & (column_C < logits_CV.shape[1])).float()
    column_C1 = column_C.clamp(0, logits_CV.shape[1] - 1).unsqueeze(1)
    dtype = logits_CV.dtype
    logp_CV = _split_log_softmax(logits_CV, vocabulary)
    del logits_CV
    own_C = logp_CV.gather(1, column_C1).squeeze(1) * here_C
    loss = -(vocabulary.summed(own_C) * counted_C).sum()
    logp_CV.exp_().scatter_add_(1, column_C1, -here_C.unsqueeze(1)).mul_(counted_C.unsqueeze(1))
    return loss, logp_CV.to(dtype)


def _split_log_softmax(logits_CV: Tensor, vocabulary: VocabularyPart) -> Tensor:
    """The log of the softmax over the whole vocabulary, for this rank's part of it."""
    logits_CV = logits_CV.float()
    logits_CV = logits_CV - vocabulary.largest(logits_CV.amax(-1)).unsqueeze(1)
    return logits_CV - vocabulary.summed(logits_CV.exp().sum(-1)).log().unsqueeze(1)


def _write_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total = a @ b` in float32, as `_add_product` computes it."""
    if a.is_cuda and a.dtype is not torch.float32 and hasattr(torch.ops.aten.mm, "dtype_out"):
        torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=total)
    else:
        total.copy_(a @ b)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b` in float32. On a GPU the product is not rounded to the inputs' dtype, if torch supports that."""
    if a.is_cuda and a.dtype is not torch.float32 and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.add_(a @ b)
