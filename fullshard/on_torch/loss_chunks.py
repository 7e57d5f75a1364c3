"""Chunked cross-entropy: the logits and their gradient are computed for one chunk of tokens at a time.

The loss is a sum over tokens. So each chunk's gradient with respect to the head's input and weight can be computed in
forward, as soon as its logits are known; then the logits are freed. The number of matrix products is that of the plain
loss: nothing is recomputed.
"""

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.errors import FullshardError
from fullshard.on_torch.loss import IGNORED, TensorBatch, extra_inputs

BUDGET = 1 << 31  # bytes of logits alive at once: in the compute dtype, in float32, and their gradient
TILE = 256  # tokens; matrix products are fastest in whole tiles
BYTES_PER_LOGIT = 8  # 2 in the compute dtype, 4 in float32, 2 for the gradient in the compute dtype


def chunked_loss(model: nn.Module, batch: TensorBatch) -> Tensor:
    """Equal to `summed_loss`, but the memory for logits depends on neither the vocabulary nor the number of tokens."""
    head = output_head(model)
    if isinstance(head.weight, DTensor) and "tensor" in (head.weight.device_mesh.mesh_dim_names or ()):
        raise FullshardError("chunked loss: the head is split over the tensor axis; use summed_loss, or a mesh with tensor = 1")
    head._fullshard_labels = batch["labels"]
    head.forward = types.MethodType(_loss_forward, head)  # type: ignore[method-assign]
    try:
        output = model(batch["input_ids"], **extra_inputs(model, batch))
    finally:
        del head.forward, head._fullshard_labels
    return output if isinstance(output, Tensor) else output.logits


def output_head(model: nn.Module) -> nn.Linear:
    """The linear layer that computes the logits. Raises if there is none."""
    found = model.get_output_embeddings() if callable(getattr(model, "get_output_embeddings", None)) else None  # type: ignore[operator]
    for name in ("lm_head", "output"):
        found = found if found is not None else getattr(model, name, None)
    if not isinstance(found, nn.Linear):
        raise FullshardError(f"chunked loss: {type(model).__name__} has no linear head called lm_head or output; use summed_loss")
    return found


def _loss_forward(self: nn.Linear, hidden_BTD: Tensor) -> Tensor:
    """Replaces the head's forward, so that FSDP's hooks on the head still gather and free its weight."""
    labels: Tensor = self._fullshard_labels  # type: ignore[assignment]
    return chunked_cross_entropy(hidden_BTD.flatten(0, 1), self.weight, labels.flatten(), self.bias)


def chunked_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, bias_V: Tensor | None = None, *, budget: int | None = None
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction="sum")`, in chunks."""
    chunk = max(1, (BUDGET if budget is None else budget) // (BYTES_PER_LOGIT * weight_VD.shape[0]))
    chunk -= chunk % TILE if chunk > TILE else 0
    return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, bias_V, labels_N, chunk)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, chunk: int) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        # Sums over chunks are in float32: in bf16 every chunk would add a rounding error.
        grads = [
            torch.zeros_like(t, dtype=torch.float32) if t is not None and w else None
            for t, w in ((weight_VD, wanted[1]), (bias_V, wanted[2]))
        ]
        grad_hidden_ND = torch.empty_like(hidden_ND) if wanted[0] else None
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        for i in range(0, hidden_ND.shape[0], chunk):
            part = slice(i, i + chunk)
            loss += _one_chunk(
                hidden_ND[part],
                weight_VD,
                bias_V,
                labels_N[part],
                None if grad_hidden_ND is None else grad_hidden_ND[part],
                *grads,
            )
        ctx.save_for_backward(grad_hidden_ND, *grads)
        ctx.dtypes = (weight_VD.dtype, bias_V.dtype if bias_V is not None else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_output,) = outputs
        hidden, *sums = ctx.saved_tensors
        # In float32: rounding the factor 1 / tokens to bf16 would bias all gradients by up to 0.4%.
        scaled = [None if g is None else g.mul_(grad_output).to(d) for g, d in zip(sums, ctx.dtypes, strict=True)]
        return (None if hidden is None else (hidden.float() * grad_output).to(hidden.dtype), *scaled, None, None)


def _one_chunk(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_C: Tensor,
    grad_hidden_CD: Tensor | None,
    grad_weight_VD: Tensor | None,
    grad_bias_V: Tensor | None,
) -> Tensor:
    """The loss of one chunk. Writes the gradient of the input and adds the gradients of weight and bias, in place."""
    counted_C = (labels_C != IGNORED).float()
    column_C1 = labels_C.clamp(min=0).unsqueeze(1)
    logp_CV = torch.log_softmax(F.linear(hidden_CD, weight_VD, bias_V), -1, dtype=torch.float32)
    loss = -(logp_CV.gather(1, column_C1).squeeze(1) * counted_C).sum()
    if grad_hidden_CD is None and grad_weight_VD is None:
        return loss
    # Softmax minus one at the label, in place. Rows without a label are zeroed later, where they have D columns, not V.
    logp_CV.exp_().scatter_add_(1, column_C1, logp_CV.new_full((1, 1), -1.0).expand_as(column_C1))
    grad_CV = logp_CV.to(weight_VD.dtype)
    counted_C1 = counted_C.unsqueeze(1).to(hidden_CD.dtype)
    if grad_hidden_CD is not None:
        torch.mm(grad_CV, weight_VD, out=grad_hidden_CD)
        grad_hidden_CD.mul_(counted_C1)
    if grad_weight_VD is not None:
        _add_product(grad_weight_VD, grad_CV.t(), hidden_CD * counted_C1)
    if grad_bias_V is not None:
        grad_bias_V.add_((logp_CV * counted_C.unsqueeze(1)).sum(0))
    return loss


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b` in float32. On a GPU the product is not rounded to the inputs' dtype, if torch supports that."""
    if a.is_cuda and a.dtype is not torch.float32 and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.add_(a @ b)
