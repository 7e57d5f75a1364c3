"""What CUDA kernels do that meta tensors do not show.

`FusedKernels` replaces functions by the fused kernel that CUDA would run. `workspace` is the temporary memory of a
kernel, `kernel_work` its flops and bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fullshard.model.costs import OpKind
from fullshard.on_torch.private import run_backward

aten = torch.ops.aten
KernelWork = tuple[OpKind, int, int, tuple[int, ...]]  # kind, flops, bytes moved, (m, n, k)

# -- fused kernels ---------------------------------------------------------------------------------------


class FusedKernels(TorchFunctionMode):
    """A function mode in which functions with a fused CUDA kernel allocate and save what that kernel does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return True
        if func is torch.Tensor.backward:
            with self:  # a mode is off while it handles a call, but remat runs the model again in backward
                return run_backward(args[0])
        fused = FUSED_KERNELS.get(func)
        return func(*args, **kwargs) if fused is None else fused(*args, **kwargs)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that torch chooses on Hopper: cuDNN's in half precision, else the memory-efficient one."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0:
        bias = _bias(attn_mask, q)
        return aten._scaled_dot_product_cudnn_attention.default(q, k, v, bias, needs_grad, dropout_p, is_causal, scale=scale)[0]
    if q.shape[1] != k.shape[1] or attn_mask is not None:  # no fused kernel takes these
        return _unfused_attention(q, k, v, attn_mask, dropout_p, is_causal, scale)
    return aten._scaled_dot_product_efficient_attention.default(q, k, v, None, needs_grad, dropout_p, is_causal, scale=scale)[0]


def _unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """Matrix products and a softmax, in the order of torch's attention.cpp. Under a dispatch mode torch itself does not add
    the mask in place."""
    half = (scale or q.shape[-1] ** -0.5) ** 0.5
    q = q * half
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, float("-inf"))
    if (groups := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ (k.transpose(-2, -1) * half)
    if mask is not None:
        scores.add_(mask)
    weights = torch._safe_softmax(scores, -1)
    del scores
    return (_dropout(weights, dropout) if dropout else weights) @ v


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A boolean mask is converted to the compute dtype, and that is kept for backward."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype)


class _RMSNorm(torch.autograd.Function):
    """aten::_fused_rms_norm: saves its input, its weight and one float per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = x.shape[: x.ndim - dims]
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = torch.empty(*rows, *[1] * dims, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
        return grad_x, torch.empty_like(weight) if weight is not None and wanted[1] else None, None


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype is not x.dtype:  # not fused on CUDA either
        return F.rms_norm(x, shape, weight, eps)
    return _RMSNorm.apply(x, weight, len(shape))


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0 or inplace:
        return F.dropout(x, p, training, inplace)
    return aten.native_dropout.default(x, p, True)[0]


FUSED_KERNELS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    F.dropout: _dropout,
}

# -- workspaces ----------------------------------------------------------------------------------------------

Workspace = tuple[str, tuple[int, ...]]  # the name of a function in `fullshard.model.kernel_workspace`, and its arguments


def workspace(name: str, args: tuple[Any, ...], outputs: list[Tensor]) -> Workspace | None:
    """The temporary memory that the kernel `name` allocates and frees; None if it allocates none."""
    rule = WORKSPACE_RULES.get(name)
    return rule(args, outputs) if rule else None


def _attention_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> Workspace:
    _, q, k = args[:3]
    b, h, t, d = q.shape
    return "attention_backward", (b, h, k.shape[1], t, k.shape[2], d, q.element_size())


def _efficient_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> Workspace:
    return "efficient_attention_backward", tuple(args[1].shape)


def _safe_softmax(args: tuple[Any, ...], outputs: list[Tensor]) -> Workspace:
    columns = outputs[0].shape[-1]
    return "safe_softmax", (outputs[0].numel() // columns, columns)


def _softmax_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> Workspace:
    return "softmax_backward", (args[0].numel(), args[0].element_size())


def _embedding_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> Workspace:
    grad, indices, rows = args[:3]
    return "embedding_backward", (indices.numel(), rows, grad.shape[-1])


def _sum(args: tuple[Any, ...], outputs: list[Tensor]) -> Workspace | None:
    """The gradient of a bias: a sum over all dims but the last."""
    source, dims = args[0], args[1] if len(args) > 1 else None
    if not dims or source.ndim < 2 or {d % source.ndim for d in dims} != set(range(source.ndim - 1)):
        return None
    return "sum_rows", (source.numel() // source.shape[-1], source.shape[-1])


def _sort(args: tuple[Any, ...], outputs: list[Tensor]) -> Workspace:
    return "sort", (args[0].numel(),)


WORKSPACE_RULES: dict[str, Callable[[tuple[Any, ...], list[Tensor]], Workspace | None]] = {
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::sum": _sum,
    "aten::sort": _sort,
}

# -- work ----------------------------------------------------------------------------------------------------

# Operators that launch several kernels, counted on an H200 (benchmarks/host_probe.py). index_put prepares, counts and
# sorts indices before it adds (Indexing.cu). A sort of few slices fills positions and runs a radix sort (Sort.cu). A
# grouped product is prepared by a kernel of its own (GroupMM.cu).
LAUNCHES = {
    "aten::index_put": 13,
    "aten::_index_put_impl_": 13,
    "aten::sort": 5,
    "aten::topk": 2,
    "aten::histc": 3,
    "aten::cumsum": 2,
    "aten::nonzero": 4,
    "aten::_grouped_mm": 2,
}


def launch_count(name: str) -> int:
    """The number of kernels that one call of an operator launches."""
    return LAUNCHES.get(name, 1)


COLLECTIVES: dict[str, OpKind] = {  # of a tensor axis; FSDP's do not occur in a trace
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
}
NO_WORK = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::detach"}


def kernel_work(name: str, args: tuple[Any, ...], outputs: list[Tensor]) -> KernelWork | None:
    """The work of one operator call; None if it launches no kernel."""
    inputs = [a for a in tree_leaves(args) if isinstance(a, Tensor)]
    if name in COLLECTIVES:
        return COLLECTIVES[name], 0, max(t.numel() * t.element_size() for t in [*inputs, *outputs]), ()
    moved = sum(t.numel() * t.element_size() for t in [*inputs, *outputs])
    if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"):
        a, b = [t for t in inputs if t.ndim > 1][-2:]
        batch = a.shape[0] if a.ndim == 3 else 1
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        return "gemm", 2 * batch * m * n * k, moved, (batch * m, n, k)
    if "scaled_dot_product" in name:
        q, key = (args[1], args[2]) if name.endswith("_backward") else (args[0], args[1])
        b, h, t, d = q.shape
        products = 5 if name.endswith("_backward") else 2
        return "attention", 2 * products * b * h * t * key.shape[2] * d, moved, (d, 1, 1)
    if name in NO_WORK or not outputs:
        return None
    return "pointwise", sum(t.numel() for t in outputs), moved, ()
