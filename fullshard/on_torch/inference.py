"""Forward without backward on sharded weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. On exit, restores the modes and frees gathered parameters.

    Units with `reshard = false` keep gathered parameters until backward. Without a backward they would stay until the
    next step: they would take memory the plan does not have, and become stale when the shards change.
    """
    training = [m for m in model.modules() if m.training]  # a caller may have put some into evaluation mode
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        free_gathered(model)


def free_gathered(model: nn.Module) -> None:
    """Free all gathered parameters; the shards remain."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
