"""Saves a sharded state as a checkpoint, and loads it again on any mesh and number of processes."""

from fullshard.checkpoint.engine_state import register
from fullshard.on_jax.saving.restore import load_checkpoint
from fullshard.on_jax.saving.save import JaxCheckpointer, save_checkpoint
from fullshard.on_jax.saving.state_arrays import weights_of

__all__ = ["JaxCheckpointer", "checkpointer", "load_checkpoint", "save_checkpoint", "weights_of"]

checkpointer = JaxCheckpointer
register("jax", save_checkpoint, load_checkpoint)
