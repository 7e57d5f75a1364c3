"""The random numbers that training draws, as dropout does: one stream for each data rank."""

import hashlib

import torch

from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.ranks.device_meshes import data_rank


def seed_dropout(state: State, seed: int) -> None:
    """Seed this rank's torch generators from `seed`, the state's step and the data rank. Ranks of a tensor group compute the
    same rows, so they draw the same numbers."""
    state.dropout_seed = seed
    text = f"dropout/{seed}/{state.step}/{data_rank(state.plan.mesh)}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)
