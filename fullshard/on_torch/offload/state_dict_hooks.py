"""Hooks on `model.state_dict()` and `model.load_state_dict()`: they use the masters of offloaded units.

The model's own parameters are shards in the compute dtype, and their memory may be freed. `state_dict` returns copies in host
memory, as masters are packed during training or on disk.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.on_torch.offload.tiered_optimizer import TieredOptimizer
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit
from fullshard.on_torch.offload.units.weak_hooks import gone
from fullshard.on_torch.tensors.shard_ranges import local, part_of, shadow
from fullshard.ranks.local_ranks import ranks_here
from fullshard.storage.pinned_arena import refuse_more_than


def hook_model(offload: TieredOptimizer, model: nn.Module) -> None:
    """Add the hooks, with weak references: the lanes' threads hold the modules, and would keep `offload` alive."""
    found = weakref.ref(offload)
    for module in model.modules():
        if any(p is not None and offload.holds(p) for p in module._parameters.values()):
            module.register_state_dict_post_hook(partial(_show_masters, found))
        if any(offload.holds(p) for p in module.parameters()):
            module.register_load_state_dict_pre_hook(partial(_load_masters, found))


def _show_masters(
    found: "weakref.ref[TieredOptimizer]", module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """For the module's own parameters; its children have hooks of their own."""
    offload = _alive(found)
    offload.flush()
    for name, p in module._parameters.items():
        if p is not None and offload.holds(p) and prefix + name in state_dict:
            unit, i = offload.unit_of(p)
            refuse_copies(offload, local(p).numel(), "model.state_dict()")
            state_dict[prefix + name] = copied(offload, unit, i, 0)


def _load_masters(
    found: "weakref.ref[TieredOptimizer]", module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
) -> None:
    """For all parameters below the module, as the outermost module comes first. A value that was taken is replaced by the
    parameter, which torch copies to itself. Values of other shapes are left for torch to refuse."""
    offload, values = _alive(found), {}
    for name, p in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if offload.holds(p) and isinstance(value, Tensor) and value is not p and value.shape == p.shape:
            values[id(p)], state_dict[prefix + name] = value, p
    if values:
        offload.flush()
        for unit in offload.units:
            _load_unit(offload, unit, values)


@torch.no_grad()
def _load_unit(offload: TieredOptimizer, unit: OffloadedUnit, values: dict[int, Tensor]) -> None:
    own = [(i, values[id(p)]) for i, p in enumerate(unit.params) if id(p) in values]
    if not own:
        return
    master = unit.state.whole()[0]
    for i, value in own:
        unit.view(master, i).copy_(part_of(value, unit.params[i]))
    offload.memory.publish(unit)
    offload.memory.give_back(changed=True)


def _alive(found: "weakref.ref[TieredOptimizer]") -> TieredOptimizer:
    offload = found()
    if offload is None:
        raise gone()
    return offload


@torch.no_grad()
def copied(offload: TieredOptimizer, unit: OffloadedUnit, index: int, which: int) -> Tensor:
    """A copy of a parameter's master (0) or of a moment in host memory; after `flush`."""
    low, high = unit.spans[index]
    flat = torch.empty(high - low, dtype=offload.memory.layout.shown[which])
    if (stored := unit.state.stored(which, index)) is not None:
        stored.read(0, flat.view(torch.uint8))
    else:
        flat.copy_(unit.state.whole()[which][low:high])
        unit.state.give_back(changed=False)
    return shadow(unit.params[index], flat.view(local(unit.params[index]).shape))


def refuse_copies(offload: TieredOptimizer, elements: int, what: str) -> None:
    """Raise if the host has no room for copies of so many elements."""
    why = f"the copy that {what} makes of state that is offloaded (fullshard.checkpoint.save needs none)"
    refuse_more_than(elements * offload.master.itemsize, ranks_here(), why)
