"""A model whose parameters are used by some ranks only, in some steps, sharded and unsharded, for `test_unused_parameters`."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard as fs
from fullshard import on_torch

ROUTES = [  # by step and rank: the experts that its two micro-batches use
    [({0, 1, 2}, {0, 3}), ({0, 1}, {2, 3})],  # all, in the first step
    [({0, 1}, {1}), ({0, 2}, {2})],  # as many on each rank, of equal sizes; expert 3 on none
    [({0}, {1}), ({2, 3, 1}, {0})],
    [({2}, {2}), ({2}, {2})],
    [({0, 1}, {2}), ({3}, {3})],
]


class Experts(nn.Module):
    """Adds to a row what the experts of its route make of it, by a loop as people write it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, route):
        for index, expert in enumerate(self.experts):
            if bool(route[index]):
                x = x + expert(self.norm(x))
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.never = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x, route):
        for layer in self.layers:
            x = layer(x, route)
        return self.head(x)


class Full(Model):
    """Without a parameter that nothing ever uses."""

    def __init__(self):
        super().__init__()
        del self.never


def loss(model, batch):
    found = (model(batch["x"], batch["route"]) ** 2).sum()
    return on_torch.Loss(found, torch.tensor(float(batch["x"].shape[0]), dtype=torch.float64))


def batch(step: int, rank: int, part: int) -> dict[str, torch.Tensor]:
    used = ROUTES[step % len(ROUTES)][rank % 2][part]
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + 10 * rank + part))
    return {"x": x, "route": torch.tensor([index in used for index in range(4)])}


def build(never: bool) -> nn.Module:
    torch.manual_seed(0)
    return Model() if never else Full()


def unsharded(never: bool, world: int, steps: int, parts: int) -> dict[str, torch.Tensor]:
    """The weights after some steps of `torch.optim.AdamW`."""
    model = build(never)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            for part in range(parts):
                given = batch(step, rank, part)
                (loss(model, given).sum / (2 * world * parts)).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def apart(
    strategy: str,
    *,
    never: bool = False,
    own: bool = False,
    parts: int = 1,
    clip: float | None = None,
    home: fs.Home | None = None,
    device: str = "cpu",
) -> dict[str, float]:
    """How far weights are from those of the unsharded model."""
    world, steps = dist.get_world_size(), 2 * len(ROUTES)
    model = build(never)
    description, batches = on_torch.describe(model, classes=["Experts"]), fs.Batch(2, 1, accumulate=parts)
    plan = getattr(fs, strategy)(description, devices=world, batch=batches, **({"home": home} if home else {}))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-2, weight_decay=0.1), first_step_checks=not own, device=device)
    for step in range(steps):
        given = [{k: v.to(device) for k, v in batch(step, dist.get_rank(), part).items()} for part in range(parts)]
        if own:
            factor = on_torch.loss_factor(state, [2.0] * parts)
            for each in given:
                (loss(state.model, each).sum * factor).backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
        else:
            on_torch.train_step(state, copy.deepcopy(given), loss=loss, clip=clip)
    wanted = unsharded(never, world, steps, parts)
    with state.values() as values:
        return {n: (_whole(v) - wanted[n]).abs().max().item() for n, v in values.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Not by `full_tensor`, in which a process on a GPU dies over gloo."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local.detach().cpu())
    return torch.cat(parts) if local.shape != tensor.shape else parts[0]
