"""Runs on ranks for `test_unit_norms`: gradient norms by unit of a sharded model, and of one process's plain model."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fullshard as fs
from fullshard import on_torch
from fullshard.plan.plan import Home
from tests.cpu.parity import DEVICE, LENGTH, LR, ROWS, build, checked, data


def sharded(strategy: str, kind: str, home: Home, compute: str, accumulate: int, clip: float | None, arguments: dict):
    """Unit norms and the global norm of two steps; and the collectives of a step with the norms and of one without."""
    model = build(kind)
    world, tensor = dist.get_world_size(), arguments.get("tensor", 1)
    given = arguments if strategy == "hybrid" else {"devices": world, **arguments}
    batch = fs.Batch(ROWS // (world // tensor) // accumulate, LENGTH, accumulate)
    plan = fs.strategy(strategy, on_torch.describe(model), **given, precision=fs.Precision(compute=compute), batch=batch)
    for unit in plan.units:
        plan = plan.change(unit.name, home=home)
    state = on_torch.shard(model, plan, fs.AdamW(lr=LR), seed=7, device=DEVICE, first_step_checks=checked(model))
    found, counts = [], []
    for step, whole in enumerate(data()[:3]):
        rows, first = batch.micro_batch, on_torch.data_rank(plan.mesh) * batch.micro_batch * accumulate
        mine = [{k: v[first + i * rows : first + (i + 1) * rows] for k, v in whole.items()} for i in range(accumulate)]
        with on_torch.record() as traffic:
            result = on_torch.train_step(state, mine, clip=clip, unit_norms=step < 2)
        counts.append(len(traffic.collectives))
        assert len(result.numbers()) == 4 + len(result.unit_norms)
        found.append(({unit: norm.item() for unit, norm in result.unit_norms.items()}, result.grad_norm.item()))
    return found, counts


def by_hand(kind: str) -> dict[str, float]:
    """The norms of the first step's gradients, by the modules that the units are made of."""
    model = build(kind)
    on_torch.initialize(model, torch.device(DEVICE), seed=7)
    batch = data()[0]
    logits = model(batch["input_ids"])
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    loss.backward()
    squares: dict[str, float] = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            unit = _unit(name.removeprefix("base_model.model."))
            squares[unit] = squares.get(unit, 0.0) + p.grad.double().square().sum().item()
    return {unit: square**0.5 for unit, square in squares.items()}


def _unit(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[1] == "layers" else "embed" if parts[1] == "embed_tokens" else "head"
