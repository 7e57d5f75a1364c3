"""`model.state_dict()` and `model.load_state_dict()`, with away units in the model: the masters in place of the copies in
the compute dtype that FSDP gathers from, whose memory may not even be there.

What `state_dict` shows is a copy in host memory: masters rest packed while training runs, and on disk as a rule.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.on_torch.offload.stores.disk_state import Stored
from fullshard.on_torch.offload.tiered_optimizer import Tiered, gone
from fullshard.on_torch.offload.units import Away, local, part_of, shadow
from fullshard.on_torch.ranks import ranks_here
from fullshard.storage.host import refuse_more_than


def hook_model(tiers: Tiered, model: nn.Module) -> None:
    """Weakly: the lanes' threads hold on to the model's modules, and would keep `tiers` alive with them."""
    found = weakref.ref(tiers)
    for module in model.modules():
        if any(p is not None and tiers.holds(p) for p in module._parameters.values()):
            module.register_state_dict_post_hook(partial(_show_masters, found))
        if any(tiers.holds(p) for p in module.parameters()):
            module.register_load_state_dict_pre_hook(partial(_load_masters, found))


def _show_masters(
    found: "weakref.ref[Tiered]", module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Of the module's own parameters; its children have hooks of their own."""
    tiers = _alive(found)
    tiers.flush()
    for name, p in module._parameters.items():
        if p is not None and tiers.holds(p) and prefix + name in state_dict:
            away, i = tiers.place_of(p)
            refuse_copies(tiers, local(p).numel(), "model.state_dict()")
            state_dict[prefix + name] = copied(tiers, away, i, 0)


def _load_masters(
    found: "weakref.ref[Tiered]", module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
) -> None:
    """Of all parameters below the module at once: the outermost module comes first. What is taken is replaced by the
    parameter itself, which torch then copies to itself; what has another shape is left for torch to refuse."""
    tiers, values = _alive(found), {}
    for name, p in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if tiers.holds(p) and isinstance(value, Tensor) and value is not p and value.shape == p.shape:
            values[id(p)], state_dict[prefix + name] = value, p
    if values:
        tiers.flush()
        for away in tiers.units:
            _load_unit(tiers, away, values)


@torch.no_grad()
def _load_unit(tiers: Tiered, away: Away, values: dict[int, Tensor]) -> None:
    own = [(i, values[id(p)]) for i, p in enumerate(away.params) if id(p) in values]
    if not own:
        return
    master = tiers.resting.memory(away)[0]
    for i, value in own:
        away.view(master, i).copy_(part_of(value, away.params[i]))
    tiers.resting.publish(away)
    tiers.resting.give_back(changed=True)


def _alive(found: "weakref.ref[Tiered]") -> Tiered:
    tiers = found()
    if tiers is None:
        raise gone()
    return tiers


@torch.no_grad()
def copied(tiers: Tiered, away: Away, index: int, which: int) -> Tensor:
    """A parameter's master (0) or a moment, in host memory of its own; after `flush`."""
    resting, (low, high) = tiers.resting, away.spans[index]
    flat = torch.empty(high - low, dtype=resting.master)
    if away.unit.home.optimizer == "disk":
        assert resting.spooled is not None
        Stored(resting.spooled, away, which, index).read(0, flat.view(torch.uint8))
    else:
        flat.copy_(resting.memory(away)[which][low:high])
    return shadow(away.params[index], flat.view(local(away.params[index]).shape))


def refuse_copies(tiers: Tiered, elements: int, what: str) -> None:
    """Raise where the host has no room for copies of so many elements."""
    why = f"the copy that {what} makes of state that rests away from the device (fullshard.checkpoint.save needs none)"
    refuse_more_than(elements * tiers.resting.master.itemsize, ranks_here(), why)
