"""Mixtures whose experts are spread over ranks, beside one process. Runs inside ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fullshard as fs
from fullshard import FullshardError, on_torch
from tests.cpu import any_model
from tests.cpu.any_model import LR, ROWS, STEPS, build, global_batch, loss, parts


def spread(kind: str, expert: int, replicate: int = 1, accumulate: int = 1, **common: Any) -> on_torch.State:
    model, world = build(kind), dist.get_world_size()
    shape = fs.Batch(ROWS // world // accumulate, 16, accumulate)
    described = on_torch.describe(model, experts=True)
    plan = fs.hybrid(described, replicate, world // replicate, expert=expert, batch=shape, **common)
    return on_torch.shard(model, plan, fs.SGD(lr=LR, momentum=0.9, decay_all=True), seed=7)


def steps(state: on_torch.State, first: int = 0, last: int = STEPS, kind: str = "mixtral") -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    world, accumulate, found = dist.get_world_size(), state.plan.batch.accumulate, []
    rank = on_torch.data_rank(state.plan.mesh)
    for step in range(first, last):
        mine = parts(global_batch(kind, step), world * accumulate)[rank * accumulate : (rank + 1) * accumulate]
        result = on_torch.train_step(state, mine, loss=loss, clip=1e9)
        found.append((result.loss.item(), result.grad_norm.item()))
    return found


def full(state: on_torch.State) -> dict[str, Tensor]:
    return {n: p.full_tensor().detach() for n, p in state.model.named_parameters()}


def compared(kind: str, expert: int, replicate: int = 1, accumulate: int = 1, **common: Any) -> dict[str, float]:
    """The largest differences from one process."""
    losses, _, want = any_model.unsharded(kind, dist.get_world_size() * accumulate)
    state = spread(kind, expert, replicate, accumulate, **common)
    found = steps(state, kind=kind)
    weights = full(state)
    return {
        "loss": max(abs(a - b) for a, (b, _) in zip(losses, found, strict=True)),
        "weights": max(float((weights[n] - w).abs().max()) for n, w in want.items()),
    }


def norms(kind: str, expert: int) -> list[float]:
    """Gradient norms of steps with experts spread over so many ranks; of 1, without an axis."""
    if expert > 1:
        return [norm for _, norm in steps(spread(kind, expert), kind=kind)]
    model = build(kind)
    shape = fs.Batch(ROWS // dist.get_world_size(), 16)
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=shape)
    state = on_torch.shard(model, plan, fs.SGD(lr=LR, momentum=0.9, decay_all=True), seed=7)
    return [norm for _, norm in steps(state, kind=kind)]


def traffic(kind: str, expert: int) -> tuple[int, int, int]:
    """Bytes of tokens that this rank exchanged in one step, the formula's, and the number of exchanges."""
    state = spread(kind, expert)
    steps(state, 0, 1, kind)
    with on_torch.record() as found:
        steps(state, 1, 2, kind)
    exchanged = [c for c in found.collectives if c.kind == "all_to_all" and c.dtype is torch.float32]
    config = state.model.config
    tokens = ROWS // dist.get_world_size() * 12
    formula = tokens * config.num_experts_per_tok * config.hidden_size * 4
    sent = [c.nbytes for c in exchanged]
    return sum(sent), formula, len(sent)


def resumed(directory: str, kind: str, first: int, second: int) -> float:
    """The largest difference of weights: two steps, a checkpoint, and two more with the experts spread otherwise."""
    whole = spread(kind, first)
    steps(whole, kind=kind)
    part = spread(kind, first)
    steps(part, 0, 2, kind)
    fs.checkpoint.save(directory, part)
    other = spread(kind, second) if second > 1 else _unspread(kind)
    fs.checkpoint.load(directory, other)
    steps(other, 2, STEPS, kind)
    want, found = full(whole), full(other)
    return max(float((found[n] - w).abs().max()) for n, w in want.items())


def _unspread(kind: str) -> on_torch.State:
    model, world = build(kind), dist.get_world_size()
    plan = fs.zero3(on_torch.describe(model), devices=world, batch=fs.Batch(ROWS // world, 16))
    return on_torch.shard(model, plan, fs.SGD(lr=LR, momentum=0.9, decay_all=True), seed=8)


def lonely(kind: str) -> dict[str, float]:
    """All tokens choose the experts of rank 0: the other ranks have none, and take part in every collective."""
    state = spread(kind, 2)
    with torch.no_grad():
        for name, p in state.model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                p.to_local().zero_()
    found = steps(state, kind=kind)
    return {"loss": found[-1][0], "norm": found[-1][1]}


def refused(kind: str, expert: int) -> str:
    try:
        spread(kind, expert)
    except FullshardError as error:
        return str(error)
    return "spread"
