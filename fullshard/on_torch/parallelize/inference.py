"""Forward without backward on sharded weights."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from fullshard.on_torch.parallelize.weight_copies import weight_copies


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. On exit, restores the modes and frees gathered parameters.

    Units with `reshard = false` keep gathered parameters until backward. Without a backward they would stay until the
    next step, and take memory the plan does not have.
    """
    training = [m for m in model.modules() if m.training]  # a caller may have put some into evaluation mode
    copies = weight_copies(model)
    model.eval()
    try:
        with torch.no_grad(), copies.kept() if copies is not None else nullcontext():
            yield
    finally:
        for module in training:
            module.training = True
