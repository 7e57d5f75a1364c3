"""What CUDA kernels do that meta tensors do not show.

`FusedKernels` replaces functions by the fused kernel that CUDA would run. `workspace` is the temporary memory of a
kernel, `kernel_work` and `further_work` its flops and bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fullshard.model.costs import OpKind
from fullshard.on_torch.private.torch_internals import run_backward
from fullshard.on_torch.tracing.attention_kernels import attention
from fullshard.on_torch.tracing.convolutions import CONVOLUTIONS, GROUP_NORMS, Convolution, KernelWork, group_norm_passes
from fullshard.on_torch.tracing.meta_outputs import tensors_in
from fullshard.on_torch.tracing.meta_values import with_index_values

aten = torch.ops.aten

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
        if func is torch.Tensor.__getitem__:
            args = (args[0], with_index_values(args[1]))
        fused = FUSED_KERNELS.get(func)
        return func(*args, **kwargs) if fused is None else fused(*args, **kwargs)


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
    F.scaled_dot_product_attention: attention,
    F.rms_norm: _rms_norm,
    F.dropout: _dropout,
}

# -- workspaces ----------------------------------------------------------------------------------------------

Workspace = tuple[str, tuple[int, ...]]  # the name of a function in `fullshard.model.kernel_workspaces`, and its arguments


def workspace(name: str, args: tuple[Any, ...], outputs: list[Tensor]) -> Workspace | None:
    """The temporary memory that the kernel `name` allocates and frees; None if it allocates none."""
    if name in CONVOLUTIONS:
        return Convolution(name, args, outputs).workspace()
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


def further_work(name: str, args: tuple[Any, ...], outputs: list[Tensor]) -> list[KernelWork]:
    """The work of the kernels that one call of an operator launches beside that of `kernel_work`."""
    if name in CONVOLUTIONS:
        return Convolution(name, args, outputs).further_work()
    if name in GROUP_NORMS:
        return group_norm_passes(name, args)
    launch: KernelWork = ("pointwise", 0, 0, ())
    return [launch] * (LAUNCHES.get(name, 1) - 1)


COLLECTIVES: dict[str, OpKind] = {  # of a tensor or expert axis; FSDP's do not occur in a trace
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
# The last: one pass over the gradient of the head, 0.15% of a step, which the stored costs of presets are without.
NO_WORK = {
    *(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")),
    "fullshard::scaled",
}


PASSES = {"fullshard::softmax_loss_": 3}  # operators that work in place, and how often they pass over their first argument
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")
WORK_WITHOUT_OUTPUT = {*COLLECTIVES, *PRODUCTS, *CONVOLUTIONS}  # kernels whose work is known though they made no tensor
# The position of the argument `is_causal`.
IS_CAUSAL = {
    "aten::_scaled_dot_product_cudnn_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention_backward": 14,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_efficient_attention_backward": 11,
}


def kernel_work(name: str, args: tuple[Any, ...], outputs: list[Tensor]) -> KernelWork | None:
    """The work of one operator call; None if it launches no kernel."""
    attention = "scaled_dot_product" in name
    if (not outputs or name in NO_WORK) and not attention and name not in WORK_WITHOUT_OUTPUT:
        return None
    inputs = tensors_in(args)
    if name in COLLECTIVES:
        return COLLECTIVES[name], 0, max(t.nbytes for t in [*inputs, *outputs]), ()
    moved = sum([t.nbytes for t in [*inputs, *outputs]])
    if name in PASSES:
        moved += (PASSES[name] - 1) * inputs[0].nbytes
    if name in PRODUCTS:
        a, b = [t for t in inputs if t.ndim > 1][-2:]
        batch = a.shape[0] if a.ndim == 3 else 1
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        return "gemm", 2 * batch * m * n * k, moved, (batch * m, n, k)
    if name in CONVOLUTIONS:
        return Convolution(name, args, outputs).work(moved)
    if attention:
        q, key = (args[1], args[2]) if name.endswith("_backward") else (args[0], args[1])
        b, h, t, d = q.shape
        products = 5 if name.endswith("_backward") else 2
        at = IS_CAUSAL.get(name, len(args))
        causal = at < len(args) and bool(args[at])
        return "attention", 2 * products * b * h * t * key.shape[2] * d, moved, (d, key.shape[2], 1 if causal else 2)
    return "pointwise", sum([t.numel() for t in outputs]), moved, ()
