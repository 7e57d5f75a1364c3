"""Ranks that were seeded differently, and `shard(…, broadcast=True)`. For `test_broadcast`."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard as fs
from fullshard import on_torch
from tests.cpu.interop import whole

STEPS = 3


class Net(nn.Module):
    """Tied weights, a frozen one, buffers, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.block[0].bias.requires_grad_(False)
        self.register_buffer("shift", torch.randn(6))
        self.register_buffer("order", torch.randperm(6), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids) + self.shift)[..., self.order])


def loss(model: nn.Module, batch: dict[str, Tensor]) -> on_torch.Loss:
    logits, ids = model(batch["ids"]), batch["ids"]
    return on_torch.Loss(F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum"), ids.numel())


def rows(step: int) -> Tensor:
    return torch.randint(0, 11, (2 * dist.get_world_size(), 5), generator=torch.Generator().manual_seed(step))


def own_rows(step: int) -> dict[str, Tensor]:
    rank = dist.get_rank()
    return {"ids": rows(step)[2 * rank : 2 * rank + 2]}


def trained(broadcast: bool, strategy: str = "zero3") -> dict[str, Any]:
    """A few steps from each rank's own seed; on rank 0 also by torch, from that rank's values."""
    torch.manual_seed(1337 + dist.get_rank())
    model = Net()
    plain = copy.deepcopy(model)
    plan = fs.strategy(strategy, on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(2, 5))
    try:
        state = on_torch.shard(model, plan, fs.SGD(lr=0.1), broadcast=broadcast)
    except fs.FullshardError as error:
        return {"said": str(error)}
    drawn = torch.rand(1)
    losses = [on_torch.train_step(state, [own_rows(s)], loss=loss).loss.item() for s in range(STEPS)]
    weights = whole(state)
    buffers = {n: b.clone() for n, b in state.model.named_buffers()}
    found = {"losses": losses, "weights": weights, "buffers": buffers, "drawn": drawn.item()}
    return found | ({"plain": by_torch(plain)} if dist.get_rank() == 0 else {})


def by_torch(model: nn.Module) -> dict[str, Any]:
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), []
    for step in range(STEPS):
        value = loss(model, {"ids": rows(step)})
        (value.sum / value.count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.sum) / value.count)
    return {
        "losses": losses,
        "weights": {n: p.detach() for n, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


def refusals() -> dict[str, str]:
    def shard(model: nn.Module) -> str:
        try:
            on_torch.shard(model, fs.zero3(on_torch.describe(model), devices=dist.get_world_size()), broadcast=True)
        except fs.FullshardError as error:
            return str(error)
        return "accepted"

    with torch.device("meta"):
        meta = Net()
    other = Net()
    if dist.get_rank():
        other.shift = torch.zeros(5)
    return {"meta": shard(meta), "other": shard(other)}
