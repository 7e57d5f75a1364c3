"""Ranks that agree: on what one of them decided, and on whether all of them succeeded.

Over a gloo group of its own, so that a background thread may use it while training uses the others.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard.errors import FullshardError, first_line

T = TypeVar("T")
TIMEOUT = timedelta(hours=2)  # a slow disk is no dead rank


_idle: list[tuple[object, dist.ProcessGroup]] = []  # groups nobody uses, each with the world it belongs to


def take_group() -> dist.ProcessGroup:
    """A gloo group of all ranks for one user at a time. Collective.

    Taken and given back, never destroyed: tearing one group down while other ranks still end their last collective on
    it, or while its threads run, is what process groups are worst at.
    """
    while _idle:
        world, group = _idle.pop()
        if world is dist.group.WORLD:
            return group
    made = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(made, dist.ProcessGroup)
    return made


def give_group(group: dist.ProcessGroup) -> None:
    """No collective of the caller's is under way on it any more."""
    _idle.append((dist.group.WORLD, group))


def gather(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def decide(group: dist.ProcessGroup, make: Callable[[], T]) -> T:
    """What the first rank makes, on all ranks. If it fails there, all raise its sentence."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        box = [attempt(make)]
    dist.broadcast_object_list(box, src=0, group=group)
    return unwrap(box)[0]


def first_decides(make: Callable[[], Any]) -> None:
    """Let the first rank do something; if it fails, all raise its sentence. Collective."""
    group = dist.group.WORLD
    assert group is not None
    decide(group, make)


def together(group: dist.ProcessGroup, make: Callable[[], T]) -> list[T]:
    """What every rank makes, on all ranks. If one fails, all raise its sentence."""
    return unwrap(gather(group, attempt(make)))


def all_or_none(make: Callable[[], T]) -> T:
    """What this rank makes, once all ranks have made theirs. If one fails, all raise its sentence, with its rank. Collective."""
    group = dist.group.WORLD
    assert group is not None
    worked, found = attempt(make)
    told = gather(group, (worked, None if worked else found))
    wrong = {rank: sentence for rank, (well, sentence) in enumerate(told) if not well}
    if not wrong:
        return found
    rank, sentence = min(wrong.items())
    raise FullshardError(sentence if len(wrong) == len(told) else f"rank {rank}: {sentence}")


def tally(group: dist.ProcessGroup, make: Callable[[], Sequence[int]], count: int) -> list[list[int]]:
    """As `together`, for `count` whole numbers of 64 bits. While all is well it is one small collective, which costs a
    tenth of objects; only when a rank has failed do sentences travel."""
    worked, found = attempt(make)
    mine = torch.tensor([int(worked), *(found if worked else [0] * count)])
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    told = [row.tolist() for row in rows]
    if not all(row[0] for row in told):
        unwrap(gather(group, (worked, None if worked else found)))
    return [row[1:] for row in told]


def settle(
    group: dist.ProcessGroup,
    leaders: Collection[int],
    make: Callable[[], Sequence[int]],
    count: int,
    finish: Callable[[list[list[int]]], None],
) -> None:
    """Every rank makes `count` numbers; if all could, the leaders, of whom the first rank is one, finish with everybody's
    numbers. If one fails in either, all raise its sentence.

    By messages to the first rank and from it: a collective wakes threads of its own, and takes four times as much of the
    cores that training uses.
    """
    rank, everybody = dist.get_rank(), range(dist.get_world_size(group))
    mine = attempt(make)
    worked, found = mine
    rows = _collect(group, everybody, [int(worked), *(found if worked else [0] * count)])
    rows = _spread(group, leaders, rows, (len(everybody), 1 + count))
    if rank in leaders and all(row[0] for row in rows):
        mine = attempt(lambda: finish([row[1:] for row in rows]))
    ends = _collect(group, leaders, [int(mine[0])])
    begun = all(row[0] for row in rows)  # what only leaders know, and the first rank says
    ((well,),) = _spread(group, everybody, [[int(begun and all(end for (end,) in ends))]], (1, 1))
    if not well:
        unwrap(gather(group, (mine[0], None if mine[0] else mine[1])))


def _collect(group: dist.ProcessGroup, ranks: Collection[int], mine: list[int]) -> list[list[int]]:
    """The numbers of these ranks, on the first; nothing elsewhere."""
    rank = dist.get_rank()
    if rank:
        if rank in ranks:
            group.send([torch.tensor(mine)], 0, 0).wait()
        return []
    rows = [mine]
    for other in [r for r in ranks if r]:
        row = torch.empty(len(mine), dtype=torch.int64)
        group.recv([row], other, 0).wait()
        rows.append(row.tolist())
    return rows


def _spread(group: dist.ProcessGroup, ranks: Collection[int], rows: list[list[int]], shape: tuple[int, int]) -> list[list[int]]:
    """The first rank's rows, on these ranks; nothing elsewhere."""
    rank = dist.get_rank()
    others = [r for r in ranks if r]
    if rank == 0 and others:
        told = torch.tensor(rows)
        for other in others:
            group.send([told], other, 0).wait()
    elif rank in others:
        told = torch.empty(shape, dtype=torch.int64)
        group.recv([told], 0, 0).wait()
        return told.tolist()
    return rows


def attempt(make: Callable[[], Any]) -> tuple[bool, Any]:
    """Failures travel as sentences: the bugs among them too, else the others would wait for ever."""
    try:
        return True, make()
    except FullshardError as error:
        return False, str(error)
    except Exception as error:
        return False, f"{type(error).__name__}: {first_line(error)}"


def unwrap(answers: list[Any]) -> list[Any]:
    failed = [value for worked, value in answers if not worked]
    if failed:
        raise FullshardError(failed[0])
    return [value for _, value in answers]
