"""A unit's collectives as objects that can be replaced: the extension point for gathers and reductions of one's own."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fullshard.base.errors import FullshardError
from fullshard.on_torch.private.fsdp_groups import GatherFunction, ReduceFunction, can_replace_collectives, replace_collectives
from fullshard.plan.plan import Plan, Unit, Wire

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


Collectives = dict[str, tuple[GatherFunction | None, ReduceFunction | None]]  # by unit; None is FSDP's own


def install_communication(found: Collectives, units: dict[str, list[FSDPModule]]) -> None:
    """Give units their own collectives."""
    for name, own in found.items():
        replace_collectives(units[name][0], *own)


def make_communication(make: MakeCommunication | None, plan: Plan) -> Collectives:
    """The collectives that `make` returns for each sharded unit; with None a unit keeps FSDP's own. Raise if they cannot be
    replaced, or if all units would keep them."""
    refuse_communication(make, plan)
    if make is None:
        return {}
    found: Collectives = {}
    for unit in plan.units:
        made = make(unit) if unit.layout != "replicated" else None
        if made is None:
            continue
        if not isinstance(made, Communication):
            raise FullshardError(
                f"communication(unit) must return an on_torch.Communication or None, not {made!r}; pass a subclass of it"
            )
        found[unit.name] = _overridden(made, "gather"), _overridden(made, "reduce")
    if not any(map(any, found.values())):
        raise FullshardError(
            "communication has no effect: no sharded unit has a `gather` or `reduce` of its own; override one of these in a "
            "subclass of on_torch.Communication, or leave it out"
        )
    return found


def _overridden(made: Communication, name: str) -> Any:
    """The method, or None if it is the base class's."""
    return None if getattr(type(made), name) is getattr(Communication, name) else getattr(made, name)


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
