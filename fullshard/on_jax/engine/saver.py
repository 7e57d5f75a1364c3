"""Checkpoints of JAX's states, as `fullshard.engine.saver.Saver`."""

from fullshard.on_jax.saving.save import checkpointer
from fullshard.on_jax.saving.state_arrays import weights_of

__all__ = ["checkpointer", "weights_of"]
