"""Runs on ranks for `test_freed_shards`: what reads parameters whose memory is freed, and what must go on working."""

import copy
import io
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fullshard import on_torch
from fullshard.base.errors import FullshardError
from tests.cpu import homes

NAME = "model.layers.0.mlp.up_proj.weight"
READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "print": str,
    "shard": lambda p: p.to_local().detach().mean(),
    "row": lambda p: p[0].norm(),
    "product": lambda p: torch.ones(3, p.shape[1]) @ p.to_local().T,
    "clone": lambda p: p.clone(),
    "copy": copy.deepcopy,
    "cast": lambda p: p.to(torch.float64),
    "whole": lambda p: p.full_tensor() + 1,
    "together": lambda p: torch._foreach_norm([p.to_local()]),
    "into another": lambda p: torch.zeros(p.to_local().shape).copy_(p.to_local()),
    "save": lambda p: torch.save(p.to_local(), io.BytesIO()),
    "write": lambda p: torch.nn.init.zeros_(p),
}


def _said(read: Callable[[Any], Any], p: Any) -> str:
    try:
        return f"read {type(read(p)).__name__}"
    except FullshardError as error:
        return str(error)


def read(case: homes.Case) -> dict[str, Any]:
    """What each way to read says before the first step and after some; how far the run is from one on the device."""
    with tempfile.TemporaryDirectory() as disk:
        said = [_said(how, homes.make(case, disk).model.get_parameter(NAME)) for how in READS.values()]
        one, other = homes.train(case, disk), homes.train(homes.resident(case), disk)
        state = one["state"]
        p, own = state.model.get_parameter(NAME), other["state"].model.get_parameter(NAME)
        said += [_said(how, p) for how in READS.values()]
        before = homes.values(state)
        state.model.load_state_dict(state.model.state_dict())
        apart = [homes.apart(one["values"], other["values"]), homes.apart(before, homes.values(state))]
        losses = [
            on_torch.train_step(s, homes.batches(s, case.steps), clip=case.clip).loss.item() for s in (state, other["state"])
        ]
    described = [(p.shape, p.dtype, p.device, p.to_local().shape, torch.zeros_like(p).to_local().sum().item()) for p in (p, own)]
    return {"said": said, "apart": apart, "losses": losses, "described": described, "held": state.held_bytes()["params"]}


def mixed(case: homes.Case) -> list[str]:
    """What a parameter of each unit says, if only some units are offloaded."""
    with tempfile.TemporaryDirectory() as disk:
        state = homes.train(replace(case, steps=1), disk)["state"]
        units = {u.name: u.home.params for u in state.plan.units}
        return [
            f"{units[state.plan.unit_of(n).name]}: {_said(READS['sum'], p).partition(' of ')[0]}"
            for n, p in state.model.named_parameters()
        ]
