"""Torch's optimizer of a state, with away units among its parameters: `step`, `state_dict` and `load_state_dict` do for
them what torch does for the others.

Hooks, not a class of its own: the optimizer stays torch's, so that schedulers, `GradScaler` and DCP take it as it is.
"""

import weakref
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.errors import FullshardError
from fullshard.on_torch.offload.state_dict_hooks import copied, refuse_copies
from fullshard.on_torch.offload.tiered_optimizer import Tiered
from fullshard.on_torch.offload.units import Away, part_of
from fullshard.on_torch.sharded_optimizer import makes_slots

Slot = dict[str, Any]  # what an optimizer keeps of a parameter


def hook_optimizer(tiers: Tiered, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer keeps `tiers` alive: who has it can go on training."""
    for p in (p for a in tiers.units for p in a.params):
        p._fullshard_optimizer = weakref.ref(optimizer)  # type: ignore[attr-defined]
    _watch_optimizers()
    optimizer.register_step_pre_hook(partial(_step, tiers))
    optimizer.register_state_dict_pre_hook(partial(_complete, tiers))
    optimizer.register_state_dict_post_hook(partial(_add_moments, tiers))
    optimizer.register_load_state_dict_pre_hook(partial(_load_moments, tiers))


@cache
def _watch_optimizers() -> None:
    """Every optimizer of this process asks first, once anything is away."""
    register_optimizer_step_pre_hook(_refuse_stranger)


def _refuse_stranger(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An optimizer that is not the state's would update the copies that FSDP gathers from, or memory that is not there."""
    for p in _parameters(optimizer):
        owner = getattr(p, "_fullshard_optimizer", None)
        if owner is not None and owner() is not optimizer:
            raise FullshardError(
                f"this {type(optimizer).__name__} holds parameters that rest away from the device, whose masters only "
                "state.optimizer updates; step that one, or leave such homes out of the plan"
            )


def _step(tiers: Tiered, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hand the gradients of away units to the lanes; torch's step finds none of them."""
    if tiers.in_step:  # the engine's own step, which has done so
        return
    if any(a is not None for a in (*args[1:], kwargs.get("closure"))):
        raise FullshardError(
            "step(closure) cannot be carried out where units rest away from the device: the closure would run after their "
            "update; call loss.backward() first, then step()"
        )
    if makes_slots(optimizer, kwargs):
        optimizer.zero_grad()  # there are slots for away units, and `_complete` makes the others
        return
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)  # a GradScaler's
    factors = [] if scale is None else [scale.to(tiers.device).reciprocal()]
    tiers.update_from_grad(factors, torch.zeros((), device=tiers.device) if found is None else found.to(tiers.device))


# -- state dicts ------------------------------------------------------------------------------------------


def _complete(tiers: Tiered, optimizer: torch.optim.Optimizer) -> None:
    """Slots of nothing for resident parameters that no step has updated yet, so that all parameters have some."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not tiers.holds(p) and not optimizer.state.get(p):
                optimizer.state[p] = _empty_slot(tiers, p)


def _empty_slot(tiers: Tiered, p: nn.Parameter) -> Slot:
    """As torch's fused Adam and foreach SGD make theirs."""
    slot: Slot = {key: torch.zeros_like(p, requires_grad=False) for key in tiers.rule.keys}
    return slot if tiers.rule.kind == "sgd" else {"step": torch.zeros((), dtype=torch.float32, device=tiers.device)} | slot


def _add_moments(tiers: Tiered, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    """Copies of what away units have, wherever it rests."""
    tiers.flush()
    refuse_copies(tiers, sum(a.moving for a in tiers.units) * tiers.rule.slots, "optimizer.state_dict()")
    places = {id(p): i for i, p in enumerate(_parameters(optimizer))}
    state = dict(found["state"])
    for away in tiers.units:
        for i, p in enumerate(away.params[: away.trained]):
            slot: Slot = {} if tiers.rule.kind == "sgd" else {"step": torch.tensor(float(tiers.steps[id(away)][i]))}
            slot |= {key: copied(tiers, away, i, which) for which, key in enumerate(tiers.rule.keys, 1)}
            if slot:
                state[places[id(p)]] = slot
    return found | {"state": dict(sorted(state.items()))}


def _load_moments(tiers: Tiered, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
    """Take what belongs to away units to where it rests, in the master's dtype; torch would narrow it to the shards'."""
    names = [name for g in given["param_groups"] for name in g["params"]]
    sizes = [[len(g["params"]) for g in groups] for groups in (given["param_groups"], optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        return None  # torch refuses it
    slots = {id(p): (name, given["state"].get(name) or {}) for p, name in zip(_parameters(optimizer), names, strict=True)}
    for away in tiers.units:
        for p in away.params[: away.trained]:
            _refuse_slot(tiers, p, *slots[id(p)])
    tiers.flush()
    for away in tiers.units:
        _load_unit(tiers, away, [slots[id(p)][1] for p in away.params[: away.trained]])
    taken = {slots[id(p)][0] for a in tiers.units for p in a.params[: a.trained]}
    return given | {"state": {name: slot for name, slot in given["state"].items() if name not in taken}}


def _refuse_slot(tiers: Tiered, p: nn.Parameter, name: object, slot: Slot) -> None:
    for key in tiers.rule.keys if slot else ():
        value = slot.get(key)
        if value is not None and (not isinstance(value, Tensor) or value.shape != p.shape):
            raise FullshardError(
                f"optimizer.load_state_dict: {key} of parameter {name} is {list(getattr(value, 'shape', []))}, the parameter is "
                f"{list(p.shape)}; load a state dict of this model and optimizer"
            )


@torch.no_grad()
def _load_unit(tiers: Tiered, away: Away, slots: list[Slot]) -> None:
    flats = tiers.resting.memory(away)
    for i, slot in enumerate(slots):
        for which, key in enumerate(tiers.rule.keys, 1):
            value, target = slot.get(key), away.view(flats[which], i)
            if value is None:  # no step has updated it yet
                target.zero_()
            else:
                target.copy_(part_of(value, away.params[i]))
    tiers.set_steps(away, [int(slot.get("step", 0)) for slot in slots])
    tiers.resting.give_back(changed=True)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """In the order of their places in a state dict."""
    return [p for group in optimizer.param_groups for p in group["params"]]
