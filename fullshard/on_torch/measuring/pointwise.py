"""Time the pointwise work of a transformer block on a CPU: everything but matrix products and attention.

On a GPU pointwise kernels are bound by bandwidth, so a few of them determine the rate. On a CPU they are not:
exponentials are slow, norms are not fused, and results are newly allocated. So the pointwise work of a whole block is
timed, forward and backward. The rate is in bytes as a trace of CUDA kernels counts them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.on_torch.measuring.timings import alternate, seconds
from fullshard.on_torch.model.built_in.llama import rotary, rotate
from fullshard.on_torch.tracing.cuda_kernels import FusedKernels, kernel_work

ROWS, HEADS, HEAD_DIM, HIDDEN = 1024, 6, 32, 512  # a model small enough to train on a CPU


def rate(budget: float) -> float:
    """Bytes per second, with bytes as a trace counts them."""
    cpu = torch.device("cpu")
    nbytes = 4 * ROWS * (HEADS * HEAD_DIM + 2 * HIDDEN)
    return traced_bytes() / seconds(alternate(lambda: _block(cpu), nbytes, cpu), cpu, budget)


def traced_bytes() -> int:
    """The bytes that a trace counts for the block."""
    call = _block(torch.device("meta"))
    with FusedKernels(), _CountBytes() as counted:
        call()
    return counted.nbytes


class _CountBytes(TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        done = None if func.is_view else kernel_work(func._schema.name, args, written)
        self.nbytes += done[2] if done else 0
        return out


def _block(device: torch.device) -> Any:
    """The pointwise work of a block with its gradients: two norms, a rotation, a residual sum and a gate."""
    dim = HEADS * HEAD_DIM
    x, gate, up = (torch.randn(ROWS, n, device=device, requires_grad=True) for n in (dim, HIDDEN, HIDDEN))
    weight = torch.ones(dim, device=device, requires_grad=True)
    cos, sin = rotary(torch.arange(ROWS, device=device), HEAD_DIM, 10_000.0)
    gradients = torch.randn(ROWS, dim, device=device), torch.randn(ROWS, HIDDEN, device=device)

    def call() -> None:
        heads = F.rms_norm(x, (dim,), weight).view(1, ROWS, HEADS, HEAD_DIM).transpose(1, 2)
        y = x + rotate(heads, cos, sin).transpose(1, 2).reshape(ROWS, dim)
        outputs = F.rms_norm(y, (dim,), weight), F.silu(gate) * up
        torch.autograd.grad(outputs, (x, gate, up, weight), gradients)

    return call
