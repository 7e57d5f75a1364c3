"""BatchNorm: its running statistics, and its arithmetic in fp32.

Each rank's running statistics are of its own batches, and are averaged before they are used or saved.

They are moving averages, and so linear: the mean over ranks is the moving average over the batches of all ranks, whenever it
is taken. (Between-rank variance is not in `running_var`, as in any data-parallel BatchNorm that does not synchronise.)
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.on_torch.model.borrowed_parameters import borrowed_parameters


def average_statistics(model: nn.Module) -> None:
    """Give all ranks the mean of their running statistics. Collective; free for models without any."""
    found = _statistics(model)
    if not found or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        flat = torch.cat([t.float().flatten() for t in found])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for t, part in zip(found, flat.split([t.numel() for t in found]), strict=True):
            t.copy_(part.view_as(t))


def compute_in_fp32(model: nn.Module) -> None:
    """Give every BatchNorm fp32 weights in its forward: CUDA takes activations in half precision, but no weights in another
    dtype than the statistics."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            module.forward = _Fp32Forward(module, module.forward)  # type: ignore[method-assign]


class _Fp32Forward:
    """The forward of a module, with its parameters in fp32."""

    def __init__(self, module: nn.Module, forward: Callable[[Tensor], Tensor]):
        self.module, self.forward = module, forward

    def __call__(self, input: Tensor) -> Tensor:
        with borrowed_parameters(self.module, {n: p.float() for n, p in self.module._parameters.items() if p is not None}):
            return self.forward(input)


def _statistics(model: nn.Module) -> list[Tensor]:
    named = [getattr(m, n, None) for m in model.modules() for n in ("running_mean", "running_var")]
    return [t for t in named if isinstance(t, Tensor)]
