"""The torch side of the comparison of engines. Runs inside ranks."""

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.model.presets import GPTSize, LlamaSize
from fullshard.on_torch.model.built_in import GPT, Llama


def make_state(size: LlamaSize | GPTSize, optimizer, batches: list, weights: str | None = None) -> on_torch.State:
    """zero3 on all ranks."""
    with torch.device("meta"):
        model = Llama(size) if isinstance(size, LlamaSize) else GPT(size)
    world, (rows, length) = dist.get_world_size(), batches[0]["labels"].shape
    shape = fs.Batch(rows // world, length)
    plan = fs.zero3(on_torch.describe(model), devices=world, batch=shape, precision=fs.Precision(compute="fp32"))
    return on_torch.shard(model, plan, optimizer, weights=weights)


def train(state: on_torch.State, batches: list, clip: float) -> list[float]:
    rank, world, rows = on_torch.data_rank(state.plan.mesh), dist.get_world_size(), len(batches[0]["labels"])
    own = slice(rank * rows // world, (rank + 1) * rows // world)
    mine = [{k: torch.from_numpy(v[own]) for k, v in batch.items()} for batch in batches]
    return [on_torch.train_step(state, [b], clip=clip).loss.item() for b in mine]


def losses(size: LlamaSize, weights: str, batches: list, lr: float, clip: float) -> tuple[list[float], list[str]]:
    """The losses of zero3 on all ranks, and the names of its parameters."""
    state = make_state(size, fs.AdamW(lr=lr), batches, weights)
    return train(state, batches, clip), [n for n, _ in state.model.named_parameters()]


def save(size, optimizer, batches: list, clip: float, where: str, steps: int, weights: str | None = None) -> str:
    """Train some steps and save; where the checkpoint is."""
    state = make_state(size, optimizer, batches, weights)
    train(state, batches[:steps], clip) if steps else None
    return fs.checkpoint.save(where, state, cursor=100 + steps, extra={"from": "torch"})


def resume(size, optimizer, batches: list, clip: float, where: str) -> dict:
    """Load a checkpoint and train on the rest of the batches."""
    state = make_state(size, optimizer, batches)
    manifest = fs.checkpoint.load(where, state)
    drawn = torch.rand(4).tolist()
    return {
        "losses": train(state, batches[manifest.step :], clip),
        "cursor": manifest.cursor,
        "step": state.step,
        "drawn": drawn,
    }
