"""The sharded state of a case: how it is made and read."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import fullshard as fs
from fullshard import on_torch
from fullshard.plan import update_pieces
from fullshard.plan.plan import Plan
from fullshard.planner.strategies import choose
from tests.fuzz.orders.case import Case, PlanChoice
from tests.fuzz.orders.oracle import Values, torch_optimizer
from tests.fuzz.orders.toy import LENGTH, ROWS, Toy, build

READERS = ("values", "state_dict", "parameters")


def make_state(case: Case, choice: PlanChoice, disk: str) -> on_torch.State:
    update_pieces.PIECE = 1 << 10  # so that a unit of a small model has several
    model = build(case.shape, case.seed)
    plan = make_plan(case, choice, model)
    on_disk = any("disk" in (u.home.params, u.home.optimizer, u.home.activations) for u in plan.units)
    state = on_torch.shard(
        model,
        plan,
        None if case.attached else case.optimizer,
        device="cpu",
        disk=disk if on_disk else None,
        cpu_share=choice.share,
        first_step_checks=case.checks,
    )
    if case.attached:
        state.optimizer = torch_optimizer(state.model, case.optimizer, foreach=False)
    return state


def make_plan(case: Case, choice: PlanChoice, model: Toy) -> Plan:
    world = dist.get_world_size()
    own: dict[str, Any] = {
        "hybrid": {"replicate": 2},
        "hpz": {"reshard": 2},
        "mixed": {"keep_whole": ["embed"]},
    }.get(choice.strategy, {})
    rows = ROWS // (world // choice.tensor) // choice.accumulate
    plan = choose(
        choice.strategy,
        on_torch.describe(model),
        devices=world,
        tensor=choice.tensor,
        batch=fs.Batch(rows, LENGTH, choice.accumulate, choice.sync),
        precision=fs.Precision(compute=case.compute),
        remat=choice.remat,
        prefetch=fs.Prefetch(choice.prefetch, choice.prefetch),
        **own,
    )
    for i, unit in enumerate(plan.units):
        activations = choice.activations if unit.name.startswith("blocks") else "device"
        plan = plan.change(unit.name, home=replace(choice.homes[i % len(choice.homes)], activations=activations))
    return replace(plan, backlog=choice.backlog)


def read(state: on_torch.State, reader: str) -> Values:
    """Parameters, moments, counts of updates and the means of buffers over ranks, in fp64. Collective."""
    with torch.no_grad():
        if reader == "values":
            with state.values() as values:
                found = {n: full(t) for n, t in values.items()} | _moments(state, state.optimizer.state)
        elif reader == "state_dict":
            shown, names = state.model.state_dict(), {n for n, _ in state.model.named_parameters()}
            found = {n: full(t) for n, t in shown.items() if n in names} | _shown_moments(state)
        else:
            found = _shown_parameters(state) | _shown_moments(state)
        return found | {n: _mean(b) for n, b in state.model.named_buffers()}


def _shown_parameters(state: on_torch.State) -> Values:
    """The model's own parameters, where they have the master's values; the others as `state.values()` has them."""
    found = {n: full(p) for n, p in state.model.named_parameters() if _shows_master(state.plan, n)}
    with state.values() as values:
        return {n: full(t) for n, t in values.items()} | found


def _shows_master(plan: Plan, name: str) -> bool:
    unit = plan.unit_of(name)
    assert unit is not None
    return unit.home.params == "device" and (unit.home.optimizer == "device" or plan.precision.compute == "fp32")


def _shown_moments(state: on_torch.State) -> Values:
    """As the optimizer's state dict has them, under the numbers of parameters in its groups."""
    params = [p for group in state.optimizer.param_groups for p in group["params"]]
    slots = state.optimizer.state_dict()["state"]
    return _moments(state, {p: slots[i] for i, p in enumerate(params) if i in slots})


def _moments(state: on_torch.State, slots: Any) -> Values:
    return {
        f"{name}.{key}": full(torch.as_tensor(slot))
        for name, p in state.model.named_parameters()
        for key, slot in slots.get(p, {}).items()
        if slot is not None
    }


def full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().double().clone()


def _mean(buffer: Tensor) -> Tensor:
    total = buffer.detach().double()
    dist.all_reduce(total)
    return total / dist.get_world_size()
