"""Trains the same model with fullshard and with another system, inside ranks."""

import torch

import fullshard as fs
from fullshard import on_torch
from fullshard.engine.bench_protocols import PeerRequest
from fullshard.on_torch import bench_engine
from fullshard.on_torch.engine.trainer import named_loss
from fullshard.on_torch.ranks.device_meshes import rank_and_world

STEPS, ACCUMULATE = 4, 2


def losses(peer: str | None) -> list[float]:
    """This rank's losses of a few steps; of fullshard where no peer is named."""
    rank, world = rank_and_world()
    model = on_torch.load_model("llama-nano")
    batch = fs.Batch(micro_batch=2, sequence=16, accumulate=ACCUMULATE)
    plan = fs.zero3(on_torch.describe(model), devices=world, batch=batch, remat="full")
    optimizer = fs.AdamW(lr=1e-2)
    if peer is None:
        state = on_torch.shard(model, plan, optimizer, seed=0)
        contestant = bench_engine.make_contestant(state, named_loss("plain"), 1.0)
    else:
        contestant = bench_engine.make_peer(peer, PeerRequest(model, plan, optimizer, 1.0, 0))
    draw = torch.Generator().manual_seed(rank)
    steps = [[_batch(draw) for _ in range(ACCUMULATE)] for _ in range(STEPS)]
    return [contestant.step(step) for step in steps]


def _batch(draw: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 17), generator=draw)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
