"""In the first step, ranks compare which unit comes next before any of them gathers it.

A unit that one rank skips would pair its gather with another unit's on the other ranks: gloo ends the process where sizes differ,
NCCL waits, and where sizes are equal weights are mixed without a word.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from fullshard.base.errors import FullshardError
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.ranks.unit_log import END, explain, gather_groups


@contextmanager
def same_units(state: State) -> Iterator[None]:
    """Inside is one forward or backward, or several forwards. In the first step, raise on all ranks if one skips a unit that
    another one computes. Collective then."""
    if not state.checks or dist.get_world_size() == 1:
        yield
        return
    groups = gather_groups(state.unit_modules)
    order = _Order(list(groups), state.device)
    undo = [group.before_use(partial(order.come, index)) for index, group in enumerate(groups.values())]
    try:
        yield
    finally:
        for each in undo:
            each()
    order.agree(order.end)


class _Order:
    """Where this rank is. A place is twice the index of a unit, and one more in backward; `end` is behind all units."""

    def __init__(self, names: list[str], device: torch.device):
        self.names, self.device, self.end, self.last = names, device, 2 * len(names), -1

    def come(self, unit: int, *, backward: bool) -> None:
        """This rank is about to use a unit."""
        if not backward and unit < self.last:  # another forward begins
            self.agree(self.end)
        self.last = -1 if backward else unit
        self.agree(2 * unit + backward)

    def agree(self, place: int) -> None:
        """Raise, on all ranks alike, unless all are at this place. Collective."""
        found = torch.tensor([place, -place], device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        most, least = found.tolist()
        if most == -least:
            return
        places: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(places, place)
        raise FullshardError(explain(dict(enumerate(places)), [*self.names, END]))
