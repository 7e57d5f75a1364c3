"""Masters and moments of offloaded units, shown by name to whoever reads or writes them between steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fullshard.on_torch.offload.tiered_optimizer import TieredOptimizer
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit


@contextmanager
def shown(offload: TieredOptimizer, *, changed: bool, at_rest: bool = False) -> Iterator[dict[str, Tensor]]:
    """By name, the masters of all offloaded parameters; torch's optimizer shows the moments as its own. `changed`: both
    are written to inside, and the shards follow. `at_rest`: what is on disk is not read, but shown on meta."""
    offload.flush(confirm=not changed)  # whoever loads a checkpoint writes
    found: dict[str, Tensor] = {}
    for unit in offload.units:
        tensors = offload.memory.tensors(unit, at_rest=at_rest)
        found |= {n: t["master"] for n, t in zip(unit.names, tensors, strict=True)}
        for p, own in zip(unit.params[: unit.trained], tensors, strict=False):
            offload.groups.state_of(p).update({k: t for k, t in own.items() if k != "master"})
    try:
        yield found
        for unit in offload.units if changed else ():
            offload.set_steps(unit, _steps(offload, unit))
            offload.memory.publish(unit)
    except BaseException:
        changed = False  # the file keeps what it had; what was half written in memory the caller has to load again
        raise
    finally:
        for p in (p for u in offload.units for p in u.params[: u.trained]):
            for key in offload.rule.keys:
                offload.groups.state_of(p).pop(key, None)
        offload.memory.give_back(changed=changed)


def _steps(offload: TieredOptimizer, unit: OffloadedUnit) -> list[int]:
    """What the optimizer's state says now."""
    return [int(offload.groups.state_of(p).get("step", 0)) for p in unit.params[: unit.trained]]
