"""Runs on ranks for `test_dropout`: which random numbers they draw."""

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch


def make(tensor: int = 1) -> on_torch.State:
    model = on_torch.load_model("llama-nano")
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), tensor=tensor, batch=fs.Batch(2, 16))
    return on_torch.shard(model, plan, fs.AdamW(lr=1e-3))


def draws(seed: int, tensor: int = 1) -> list[float]:
    on_torch.seed_dropout(make(tensor), seed)
    return torch.rand(4).tolist()


def save(checkpoint_dir: str, seed: int) -> list[float]:
    """What would be drawn next when a checkpoint is made."""
    state = make()
    on_torch.seed_dropout(state, seed)
    torch.rand(5)
    fs.checkpoint.save(checkpoint_dir, state)
    return torch.rand(4).tolist()


def load(checkpoint_dir: str, seed: int, tensor: int = 1) -> list[float]:
    """What is drawn after it is loaded."""
    state = make(tensor)
    on_torch.seed_dropout(state, seed)
    torch.manual_seed(dist.get_rank())
    fs.checkpoint.load(checkpoint_dir, state)
    return torch.rand(4).tolist()
