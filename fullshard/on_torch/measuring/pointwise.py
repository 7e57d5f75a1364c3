"""The small change of a transformer's block, everything but its products, as training runs it on a CPU.

On a GPU pointwise kernels are bound by bandwidth, and a handful of them tell the rate. On a CPU exponentials take
longer than bytes, norms are not fused, results are allocated anew: so the whole mix is timed, forward and backward,
and its rate is that of the bytes which a trace, of CUDA's kernels, counts for it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.on_torch.measuring.timings import in_turn, seconds
from fullshard.on_torch.models.llama import rotary, rotate
from fullshard.on_torch.tracing.cuda_kernels import FusedKernels, kernel_work

ROWS, HEADS, HEAD, HIDDEN = 1024, 6, 32, 512  # the sizes of models that one trains on CPUs


def rate(budget: float) -> float:
    """Bytes a second, as a trace counts bytes."""
    cpu = torch.device("cpu")
    nbytes = 4 * ROWS * (HEADS * HEAD + 2 * HIDDEN)
    return moved() / seconds(in_turn(lambda: _block(cpu), nbytes, cpu), cpu, budget)


def moved() -> int:
    """Bytes that a trace counts for the block."""
    call = _block(torch.device("meta"))
    with FusedKernels(), _Moved() as counted:
        call()
    return counted.nbytes


class _Moved(TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        done = None if func.is_view else kernel_work(func._schema.name, args, written)
        self.nbytes += done[2] if done else 0
        return out


def _block(device: torch.device) -> Any:
    """Two norms, a rotation, a sum and a gate, and their gradients; between them, where products would be, nothing."""
    dim = HEADS * HEAD
    x, gate, up = (torch.randn(ROWS, n, device=device, requires_grad=True) for n in (dim, HIDDEN, HIDDEN))
    weight = torch.ones(dim, device=device, requires_grad=True)
    cos, sin = rotary(torch.arange(ROWS, device=device), HEAD, 10_000.0)
    gradients = torch.randn(ROWS, dim, device=device), torch.randn(ROWS, HIDDEN, device=device)

    def call() -> None:
        heads = F.rms_norm(x, (dim,), weight).view(1, ROWS, HEADS, HEAD).transpose(1, 2)
        y = x + rotate(heads, cos, sin).transpose(1, 2).reshape(ROWS, dim)
        ends = F.rms_norm(y, (dim,), weight), F.silu(gate) * up
        torch.autograd.grad(ends, (x, gate, up, weight), gradients)

    return call
