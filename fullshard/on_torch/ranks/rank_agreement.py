"""Agreement between ranks: one rank's decision for all of them, and whether all of them succeeded.

Each uses a gloo group of its own, so that a background thread can use it while training uses other groups.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard.base.errors import attempt, unwrap
from fullshard.ranks.agreement import RankAgreement

T = TypeVar("T")
TIMEOUT = timedelta(hours=2)  # a rank may have to wait for a slow disk
_idle: list[tuple[object, dist.ProcessGroup]] = []  # released groups, each with its world group


def acquire_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, for the caller alone until `release_group`. Collective.

    Groups are reused and never destroyed: destroying one while another rank still finishes a collective on it can hang
    or crash.
    """
    while _idle:
        world, group = _idle.pop()
        if world is dist.group.WORLD:
            return group
    made = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(made, dist.ProcessGroup)
    return made


def release_group(group: dist.ProcessGroup) -> None:
    """Return a group for reuse. All collectives of the caller on it must be done."""
    _idle.append((dist.group.WORLD, group))


class GroupAgreement(RankAgreement):
    """The ranks of torch's world group. `group`: the one they agree on; by default a gloo group of their own until `close`, which
    makes the constructor collective."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.own = group is None
        self.group = group or acquire_group()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def close(self) -> None:
        if self.own:
            release_group(self.group)

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found

    def decide(self, make: Callable[[], T]) -> T:
        result: list[Any] = [attempt(make) if self.rank == 0 else None]
        dist.broadcast_object_list(result, src=0, group=self.group)
        return unwrap(result)[0]

    def gather_integers(self, make: Callable[[], Sequence[int]], count: int) -> list[list[int]]:
        """If all ranks succeed, this is one small collective, which costs a tenth of gathering objects. Error sentences are
        gathered only after a failure."""
        succeeded, result = attempt(make)
        own = torch.tensor([int(succeeded), *(result if succeeded else [0] * count)])
        tensors = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(tensors, own, group=self.group)
        rows = [tensor.tolist() for tensor in tensors]
        if not all(row[0] for row in rows):
            unwrap(self.gather((succeeded, None if succeeded else result)))
        return [row[1:] for row in rows]

    def gather_then_finish(
        self, leaders: Collection[int], make: Callable[[], Sequence[int]], count: int, finish: Callable[[list[list[int]]], None]
    ) -> None:
        """Uses point-to-point messages through rank 0: a collective wakes threads of its own and takes four times as much CPU
        time from training."""
        all_ranks = range(self.world)
        outcome = attempt(make)
        succeeded, result = outcome
        rows = _send_to_first(self.group, all_ranks, [int(succeeded), *(result if succeeded else [0] * count)])
        rows = _send_from_first(self.group, leaders, rows, (self.world, 1 + count))
        all_made = all(row[0] for row in rows)  # only leaders have rows; rank 0 passes the verdict on
        if self.rank in leaders and all_made:
            outcome = attempt(lambda: finish([row[1:] for row in rows]))
        finished = _send_to_first(self.group, leaders, [int(outcome[0])])
        verdict = int(all_made and all(good for (good,) in finished))
        ((good,),) = _send_from_first(self.group, all_ranks, [[verdict]], (1, 1))
        if not good:
            unwrap(self.gather((outcome[0], None if outcome[0] else outcome[1])))


def _send_to_first(group: dist.ProcessGroup, ranks: Collection[int], own: list[int]) -> list[list[int]]:
    """The integers of these ranks, on rank 0; an empty list on the others."""
    rank = dist.get_rank()
    if rank:
        if rank in ranks:
            group.send([torch.tensor(own)], 0, 0).wait()
        return []
    rows = [own]
    for other in [r for r in ranks if r]:
        row = torch.empty(len(own), dtype=torch.int64)
        group.recv([row], other, 0).wait()
        rows.append(row.tolist())
    return rows


def _send_from_first(
    group: dist.ProcessGroup, ranks: Collection[int], rows: list[list[int]], shape: tuple[int, int]
) -> list[list[int]]:
    """Rank 0's rows, on these ranks; the caller's own rows on the others."""
    rank = dist.get_rank()
    others = [r for r in ranks if r]
    if rank == 0 and others:
        message = torch.tensor(rows)
        for other in others:
            group.send([message], other, 0).wait()
    elif rank in others:
        message = torch.empty(shape, dtype=torch.int64)
        group.recv([message], 0, 0).wait()
        return message.tolist()
    return rows


def main_agreement() -> GroupAgreement:
    """The agreement of main threads, on the group that training uses."""
    world = dist.group.WORLD
    assert world is not None
    return GroupAgreement(world)
