"""The torch side of the comparison of engines. Runs inside ranks."""

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.model.presets import LlamaSize
from fullshard.on_torch.models import Llama


def losses(size: LlamaSize, weights: str, batches: list, lr: float, clip: float) -> tuple[list[float], list[str]]:
    """The losses of zero3 on all ranks, and the names of its parameters."""
    with torch.device("meta"):
        model = Llama(size)
    world, rows = dist.get_world_size(), len(batches[0]["labels"])
    shape = fs.Batch(rows // world, batches[0]["labels"].shape[1])
    plan = fs.zero3(on_torch.describe(model), devices=world, batch=shape, precision=fs.Precision(compute="fp32"))
    state = on_torch.shard(model, plan, fs.AdamW(lr=lr), weights=weights)
    rank = on_torch.data_rank(plan.mesh)
    own = slice(rank * rows // world, (rank + 1) * rows // world)
    mine = [{k: torch.from_numpy(v[own]) for k, v in batch.items()} for batch in batches]
    return [on_torch.train_step(state, [b], clip=clip).loss.item() for b in mine], [n for n, _ in model.named_parameters()]
