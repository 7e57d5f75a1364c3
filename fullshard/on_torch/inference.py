"""Forward without backward on sharded weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; after, the mode it was in and nothing left gathered.

    Units that keep their parameters until backward would otherwise keep them until the next training step:
    more memory than the plan says, and old values once the shards change.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        free_gathered(model)


def free_gathered(model: nn.Module) -> None:
    """Free every gathered parameter; the shards are what remains."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
