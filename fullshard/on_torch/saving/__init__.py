"""Saves a sharded state as a checkpoint, and loads it again on any number of ranks."""

from fullshard.checkpoint.engine_state import register
from fullshard.on_torch.saving.restore import load_checkpoint
from fullshard.on_torch.saving.save import save_checkpoint

register("torch", save_checkpoint, load_checkpoint)
