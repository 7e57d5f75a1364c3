"""A unit's collectives as objects that can be replaced: the extension point for gathers and reductions of one's own."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fullshard.errors import FullshardError
from fullshard.on_torch.fsdp_groups import can_replace_collectives, replace_collectives
from fullshard.plan import Plan, Unit, Wire

# Their names since torch 2.13, which deprecates the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Fill the flat `output` with the flat `shard` of every rank."""
    _all_gather(output, shard, group=group)


class Communication:
    """The collectives of one unit. Override `gather`, `reduce` or both; what is not overridden stays FSDP's own.

    Both are called on the stream that FSDP communicates on, by all ranks of `group` in the same order. They have finished, or
    are queued on that stream, when they return.
    """

    def __init__(self, unit: Unit):
        self.unit = unit

    def gather(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        """Fill `output` with the flat `shard` of every rank, in their order. `shard` may be this rank's part of `output`."""
        all_gather(output, shard, group)

    def reduce(self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup) -> None:
        """Fill `output` with this rank's part of the sum of `gradients` over ranks. `gradients` may be overwritten."""
        _reduce_scatter(output, gradients, op=dist.ReduceOp.SUM, group=group)


MakeCommunication = Callable[[Unit], Communication | None]


def install_communication(make: MakeCommunication, plan: Plan, units: dict[str, list[FSDPModule]]) -> None:
    """Give each unit that is sharded the collectives that `make` returns for it; with None it keeps FSDP's own. Raise if all
    units would keep them."""
    replaced = False
    for unit in plan.units:
        found = make(unit) if unit.layout != "replicated" else None
        if found is None:
            continue
        refuse_no_communication(found)
        own = [_overridden(found, name) for name in ("gather", "reduce")]
        replaced |= any(own)
        replace_collectives(units[unit.name][0], *own)
    if not replaced:
        raise FullshardError(
            "communication has no effect: no sharded unit has a `gather` or `reduce` of its own; override one of these in a "
            "subclass of on_torch.Communication, or leave it out"
        )


def _overridden(found: Communication, name: str) -> Any:
    """The method, or None if it is the base class's."""
    return None if getattr(type(found), name) is getattr(Communication, name) else getattr(found, name)


def refuse_no_communication(found: object) -> None:
    if not isinstance(found, Communication):
        raise FullshardError(
            f"communication(unit) must return an on_torch.Communication or None, not {found!r}; pass a subclass of it"
        )


def refuse_communication(make: object, plan: Plan) -> None:
    """Raise if the collectives cannot be replaced, or if there are none."""
    if make is None and plan.wire.is_plain:
        return
    if not can_replace_collectives():
        raise FullshardError("this torch cannot replace FSDP's collectives (wire, communication); install torch 2.11 or newer")
    if make is None:
        return
    if not callable(make):
        raise FullshardError(f"communication must be a function of a unit, or a subclass of on_torch.Communication, not {make!r}")
    if plan.wire != Wire():
        raise FullshardError(f"communication has no effect beside the plan's wire ({plan.wire}); leave one of them out")
    if plan.mesh.shard == 1 or all(u.layout == "replicated" for u in plan.units):
        raise FullshardError("communication has no effect: nothing is gathered or reduced to shards by this plan; leave it out")
