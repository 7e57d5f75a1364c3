"""Checkpoints of JAX's states, as `fullshard.engine.saver.Saver`."""

from fullshard.on_jax.saving.save import JaxCheckpointer as checkpointer  # noqa: N813 - a call makes one
from fullshard.on_jax.saving.state_arrays import weights_of

__all__ = ["checkpointer", "weights_of"]
