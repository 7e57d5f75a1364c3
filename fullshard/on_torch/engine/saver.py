"""Checkpoints of torch's states, as `fullshard.engine.saver.Saver`."""

from fullshard.on_torch.saving.save import Checkpointer as checkpointer  # noqa: N813 - a call makes one
from fullshard.on_torch.saving.state_tensors import weights_of

__all__ = ["checkpointer", "weights_of"]
