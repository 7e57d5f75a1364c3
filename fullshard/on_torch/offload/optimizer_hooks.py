"""Hooks on torch's optimizer: `step`, `state_dict` and `load_state_dict` include offloaded units.

Hooks instead of a class: the optimizer stays torch's, so that schedulers, `GradScaler` and DCP accept it.
"""

import weakref
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.base.errors import FullshardError
from fullshard.on_torch.offload.state_dict_hooks import copied, refuse_copies
from fullshard.on_torch.offload.tiered_optimizer import TieredOptimizer
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit
from fullshard.on_torch.optimizers.low_bit_adam import low_bit_of
from fullshard.on_torch.optimizers.sharded_optimizer import makes_state
from fullshard.on_torch.tensors.shard_ranges import part_of

OWNER = "_fullshard_optimizer"  # an attribute of offloaded parameters: the optimizer that updates them
ParameterState = dict[str, Any]  # an optimizer's tensors for one parameter, by name


def hook_optimizer(offload: TieredOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Add the hooks. They keep `offload` alive as long as the optimizer lives."""
    for p in (p for a in offload.units for p in a.params):
        setattr(p, OWNER, weakref.ref(optimizer))
    _watch_optimizers()
    optimizer.register_step_pre_hook(partial(_step, offload))
    optimizer.register_state_dict_pre_hook(partial(_complete, offload))
    optimizer.register_state_dict_post_hook(partial(_add_moments, offload))
    optimizer.register_load_state_dict_pre_hook(partial(_load_moments, offload))


@cache
def _watch_optimizers() -> None:
    """Check every optimizer's step in this process, once there are offloaded units."""
    register_optimizer_step_pre_hook(_refuse_stranger)


def _refuse_stranger(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if another optimizer than the state's holds offloaded parameters: it would update the shards, or freed memory."""
    for p in _parameters(optimizer):
        owner = getattr(p, OWNER, None)
        if owner is not None and owner() is not optimizer:
            raise FullshardError(
                f"this {type(optimizer).__name__} holds offloaded parameters, whose masters only "
                "state.optimizer updates; step that one, or leave such homes out of the plan"
            )


def _step(offload: TieredOptimizer, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hand the gradients of offloaded units to the lanes; torch's step then finds none."""
    if offload.in_step:  # the engine's own step, which has done so
        return
    if any(a is not None for a in (*args[1:], kwargs.get("closure"))):
        raise FullshardError(
            "step(closure) cannot be carried out where units are offloaded: the closure would run after their "
            "update; call loss.backward() first, then step()"
        )
    if makes_state(optimizer, kwargs):
        optimizer.zero_grad()  # offloaded units have their state, and `_complete` makes that of the others
        return
    if offload.taken:
        raise FullshardError(
            "step() has no gradients of offloaded units: the last step took them, and no backward has run since; call "
            "loss.backward() before each step()"
        )
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)  # a GradScaler's
    factors = [] if scale is None else [scale.to(offload.device).reciprocal()]
    offload.update_from_grad(factors, torch.zeros((), device=offload.device) if found is None else found.to(offload.device))


# -- state dicts ------------------------------------------------------------------------------------------


def _complete(offload: TieredOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Add zero state for resident parameters that have had no step, so that all parameters have some."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not offload.holds(p) and not optimizer.state.get(p):
                optimizer.state[p] = _zero_state(offload, p)


def _zero_state(offload: TieredOptimizer, p: nn.Parameter) -> ParameterState:
    """Zero state, as torch's fused Adam and foreach SGD make it."""
    if (low_bit := low_bit_of(offload.groups.optimizer)) is not None:
        return low_bit.state_of(p)
    slot: ParameterState = {key: torch.zeros_like(p, requires_grad=False) for key in offload.rule.keys}
    return slot if offload.rule.kind == "sgd" else {"step": torch.zeros((), dtype=torch.float32, device=offload.device)} | slot


def _add_moments(offload: TieredOptimizer, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    """Add copies of the state of offloaded units."""
    offload.flush()
    refuse_copies(offload, sum(a.moving for a in offload.units) * offload.rule.slots, "optimizer.state_dict()")
    places = {id(p): i for i, p in enumerate(_parameters(optimizer))}
    state = dict(found["state"])
    for unit in offload.units:
        for i, p in enumerate(unit.params[: unit.trained]):
            slot: ParameterState = {} if offload.rule.kind == "sgd" else {"step": torch.tensor(float(unit.steps[i]))}
            slot |= {key: copied(offload, unit, i, which) for which, key in enumerate(offload.rule.keys, 1)}
            if slot:
                state[places[id(p)]] = slot
    return found | {"state": dict(sorted(state.items()))}


def _load_moments(offload: TieredOptimizer, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
    """Load the state of offloaded units in the master's dtype; torch would narrow it to that of the shards."""
    names = [name for g in given["param_groups"] for name in g["params"]]
    sizes = [[len(g["params"]) for g in groups] for groups in (given["param_groups"], optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        return None  # torch refuses it
    slots = {id(p): (name, given["state"].get(name) or {}) for p, name in zip(_parameters(optimizer), names, strict=True)}
    for unit in offload.units:
        for p in unit.params[: unit.trained]:
            _refuse_state(offload, p, *slots[id(p)])
    offload.flush()
    for unit in offload.units:
        _load_unit(offload, unit, [slots[id(p)][1] for p in unit.params[: unit.trained]])
    taken = {slots[id(p)][0] for a in offload.units for p in a.params[: a.trained]}
    return given | {"state": {name: slot for name, slot in given["state"].items() if name not in taken}}


def _refuse_state(offload: TieredOptimizer, p: nn.Parameter, name: object, slot: ParameterState) -> None:
    for key in offload.rule.keys if slot else ():
        value = slot.get(key)
        if value is not None and (not isinstance(value, Tensor) or value.shape != p.shape):
            raise FullshardError(
                f"optimizer.load_state_dict: {key} of parameter {name} is {list(getattr(value, 'shape', []))}, the parameter is "
                f"{list(p.shape)}; load a state dict of this model and optimizer"
            )


@torch.no_grad()
def _load_unit(offload: TieredOptimizer, unit: OffloadedUnit, slots: list[ParameterState]) -> None:
    flats = unit.state.whole()
    for i, slot in enumerate(slots):
        for which, key in enumerate(offload.rule.keys, 1):
            value, target = slot.get(key), unit.view(flats[which], i)
            if value is None:  # no step has updated it yet
                target.zero_()
            else:
                target.copy_(part_of(value, unit.params[i]))
    offload.set_steps(unit, [int(slot.get("step", 0)) for slot in slots])
    offload.memory.give_back(changed=True)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters, in the order of a state dict."""
    return [p for group in optimizer.param_groups for p in group["params"]]
