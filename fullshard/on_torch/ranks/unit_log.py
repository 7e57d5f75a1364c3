"""The order in which this rank gathered and reduced units, for ranks that lose each other to find out which of them skipped one.

A unit that one rank skips pairs its collectives with others of the other ranks. gloo then aborts the process whose buffer is
smaller, and its peers only hear that a connection is gone, or both wait. Once that has happened, each rank puts its own order
into the store, and looks for the first place where a neighbour's differs. Until then a collective costs one append, and a
thread looks every second whether the order grows.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fullshard.base.errors import REFUSED, FullshardError
from fullshard.on_torch.private.fsdp_groups import GatherGroup, gather_group
from fullshard.on_torch.private.torch_internals import default_store
from fullshard.on_torch.ranks.abort import before_abort, shut_connections
from fullshard.on_torch.ranks.first_failure import lost_a_peer
from fullshard.on_torch.ranks.store_messages import StoreClient
from fullshard.ranks.hang_reports import call_with_timeout
from fullshard.ranks.messages import POLL

T = TypeVar("T")
END = "the end"  # of a forward or backward, in the place of a unit
KEPT = 4096  # of the newest collectives: more than a step has, of which two ranks are never further apart
TICK = 1.0  # seconds between looks of the thread
STALLED = 5.0  # seconds in a collective after which a rank compares its order; then after twice as many, and so on
ASKED = 5.0  # seconds in which ranks that lost each other publish their orders
LINGER = 3.0  # seconds that a process stays for others to read its order and to raise: a launcher ends all with the first


class PlaceLog:
    """Places in the order in which this rank came to them. One is twice the index of a unit, plus 1 in backward."""

    def __init__(self) -> None:
        self.places: deque[int] = deque(maxlen=KEPT)
        self.count = 0

    def come(self, unit: int, *, backward: bool) -> None:
        self.places.append(2 * unit + backward)
        self.count += 1

    def published(self) -> list[int]:
        """The number of places that are forgotten, then the others."""
        return [self.count - len(self.places), *self.places]


class UnitLog:
    """The units of all models of a process: in which order they were used, and in which their collectives were issued."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.used, self.issued = PlaceLog(), PlaceLog()
        self.begun, self.failed = 0, False  # how often the orders began anew, and whether they are about to
        self.inside = False  # this rank is in a unit's collective
        self.digest = 0  # of the places where collectives were issued, since whoever reads it set it to 0

    def add(self, names: list[str]) -> int:
        """Add the units of a model. Returns the index of its first one. Its end comes as one more."""
        first = len(self.names)
        self.names += [*names, END]
        return first

    def issue(self, unit: int, *, backward: bool) -> None:
        """This rank is about to gather or to reduce a unit."""
        self._begin_anew()
        self.issued.come(unit, backward=backward)
        self.digest = (self.digest * 1000003 + 2 * unit + backward + 1) % 2**61

    def use(self, unit: int, *, backward: bool) -> None:
        """This rank is about to use a unit. Backward says so for each of its outputs."""
        self._begin_anew()
        if not self.used.places or self.used.places[-1] != 2 * unit + backward:
            self.used.come(unit, backward=backward)

    def end(self, unit: int) -> None:
        """A forward or a backward is done. One without collectives is this rank's own affair."""
        if self.issued.places and self.names[self.issued.places[-1] // 2] != END:
            self.issued.come(unit, backward=False)
            self.used.come(unit, backward=False)

    def fail(self) -> None:
        """A forward or backward has failed: where it did is each rank's own affair. The orders begin anew with the next one."""
        self.failed = True

    def _begin_anew(self) -> None:
        if self.failed:
            self.used, self.issued, self.begun, self.failed = PlaceLog(), PlaceLog(), self.begun + 1, False

    def published(self) -> "Published":
        return self.begun, self.issued.published(), self.used.published()

    def explain(self, logs: "dict[int, Published]") -> str | None:
        """Which rank has skipped which unit, as a sentence; None if all have issued the same collectives. Collectives tell
        whether one has, since a unit that is gathered may be left out; the order of uses tells which, since gathers are ahead."""
        same = {rank: log for rank, log in logs.items() if log[0] == self.begun}
        issued = first_difference({rank: log[1] for rank, log in same.items()})
        if issued is None:
            return None
        return explain(first_difference({rank: log[2] for rank, log in same.items()}) or issued, self.names)


Published = tuple[int, list[int], list[int]]
LOG = UnitLog()


def log_units(groups: dict[str, GatherGroup], shards: dist.ProcessGroup, device: torch.device) -> Callable[[], None]:
    """Log the collectives of these units, and let errors that follow from a skipped one say so. `shards`: the ranks that gather
    together. Returns a function to be called at the end of each forward and backward."""
    if dist.get_world_size() == 1:
        return _do_nothing
    first = LOG.add(list(groups))
    for index, group in enumerate(groups.values()):
        group.before_collectives(partial(LOG.issue, first + index))
        group.before_use(partial(LOG.use, first + index))
        group.wrap_collectives(_in_collective)
    _LogWatch.ranks = _fewest(_LogWatch.ranks, shards if shards.size() > 1 else dist.group.WORLD)
    if device.type == "cpu":  # gloo waits in the call, without Python's lock; NCCL waits on the device, and does not abort
        _LogWatch.begin()
        before_abort(_explain_abort)
    return partial(LOG.end, first + len(groups))


def gather_groups(units: Mapping[str, Sequence[FSDPModule]]) -> dict[str, GatherGroup]:
    """The parameter groups of units by name, of those that have parameters of their own."""
    found = {name: gather_group(modules[0]) for name, modules in units.items() if modules}
    return {name: group for name, group in found.items() if group is not None}


def _do_nothing() -> None:
    pass


# -- when ranks lose each other ------------------------------------------------------------------------------


@contextmanager
def explained_losses() -> Iterator[None]:
    """Inside, an error that only says that another rank is gone names the unit that a rank skipped, if one did."""
    try:
        yield
    except RuntimeError as error:
        explain_loss(error)
        raise


def _in_collective(call: Callable[..., T]) -> Callable[..., T]:
    """The function, inside which this rank is in a unit's collective. Runs for every unit: two assignments, no more."""

    def inside(*arguments: Any, **more: Any) -> T:
        outer, LOG.inside = LOG.inside, True
        try:
            return call(*arguments, **more)
        except RuntimeError as error:
            explain_loss(error)
            raise
        finally:
            LOG.inside = outer

    return inside


def explain_loss(error: RuntimeError) -> None:
    """Raise the sentence, if there is one."""
    if lost_a_peer(error) and (sentence := _lost()) is not None:
        raise FullshardError(sentence) from error


@cache  # ranks do not find each other again
def _lost() -> str | None:
    return skipped_unit()


def skipped_unit() -> str | None:
    """Which rank has skipped which unit, as a sentence, when neighbours are known to ask as well; None if orders are the same."""
    return _skipped(ASKED)


def _explain_abort() -> None:
    """In the thread of gloo that is about to abort this process, while the main thread waits for it."""
    if not dist.is_initialized():
        return
    shut_connections({_port(default_store())})  # as the abort would, but for the store, which may be in this process
    _end(skipped_unit(), alone=False)


class _LogWatch(threading.Thread):
    """Compares orders once this rank has waited in a collective for a while: ranks may wait for different ones forever. One in a
    process. It never looks at the main thread's frames, whose local tensors would live longer for it."""

    ranks: list[int] = []  # that gather together; of several models, the fewest
    one: "ClassVar[_LogWatch | None]" = None

    @classmethod
    def begin(cls) -> None:
        if cls.one is None:
            cls.one = cls(daemon=True, name="order of units")
            cls.one.start()

    def run(self) -> None:
        seen, since, due = (0, 0), 0.0, STALLED
        while True:
            time.sleep(TICK)
            now = (LOG.begun, LOG.issued.count)
            if now != seen:
                seen, since, due = now, time.monotonic(), STALLED
            elif time.monotonic() - since > due and dist.is_initialized():
                due *= 2
                if LOG.inside:
                    sentence = _skipped(0.0)
                    if (LOG.begun, LOG.issued.count) == seen:
                        _end(sentence, alone=True)
                else:  # it may wait in another collective for a rank that then asks
                    call_with_timeout(ASKED, lambda: StoreClient().put(f"units/{dist.get_rank()}", LOG.published()))


def _fewest(ranks: list[int], group: Any) -> list[int]:
    found = dist.get_process_group_ranks(group)
    return found if not ranks or len(found) < len(ranks) else ranks


def _neighbours() -> set[int]:
    """The ranks before and behind this one. If any two ranks of a group differ, two neighbours do."""
    ranks = _LogWatch.ranks
    at = ranks.index(dist.get_rank())
    return {ranks[at - 1], ranks[(at + 1) % len(ranks)]}


def _end(sentence: str | None, *, alone: bool) -> None:
    """End this process with the sentence, if there is one. `alone`: no rank is known to raise it."""
    if sentence is None:
        return
    if alone and call_with_timeout(ASKED, lambda: StoreClient().claim("units/said")) is not False:
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    time.sleep(LINGER)
    os._exit(REFUSED)


def _skipped(seconds: float) -> str | None:
    """Which rank has skipped which unit, as a sentence; None if no neighbour publishes another order in time."""
    return call_with_timeout(seconds + ASKED, lambda: _compare(StoreClient(), _neighbours(), seconds))


def _compare(client: StoreClient, neighbours: set[int], seconds: float) -> str | None:
    rank, deadline = dist.get_rank(), time.monotonic() + seconds
    client.put(f"units/{rank}", LOG.published())
    while True:
        logs = client.collect("units", neighbours, 0) | {rank: LOG.published()}
        if (sentence := LOG.explain(logs)) is not None:
            _wait_for_readers(client, rank, neighbours)
            return sentence
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL)


def _wait_for_readers(client: StoreClient, rank: int, readers: set[int]) -> None:
    """The store may be in the process of rank 0."""
    client.put(f"units-read/{rank}", True)
    if rank == 0:
        client.collect("units-read", readers, LINGER)


def _port(store: Any) -> int | None:
    """The port of a TCP store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


# -- orders --------------------------------------------------------------------------------------------------


def first_difference(orders: dict[int, list[int]]) -> dict[int, int] | None:
    """The places of the ranks that have come so far, at the first point where two differ. `orders`: as `PlaceLog.published`."""
    begin = max(order[0] for order in orders.values())
    rows = {rank: order[1 + begin - order[0] :] for rank, order in orders.items()}
    for at in range(max(map(len, rows.values()))):
        places = {rank: row[at] for rank, row in rows.items() if at < len(row)}
        if len(set(places.values())) > 1:
            return places
    return None


def explain(places: dict[int, int], names: list[str]) -> str:
    """Which ranks skip which unit. In forward the first unit of those that ranks are at is the one that others have skipped, in
    backward the last."""
    used = [p for p in places.values() if names[p // 2] != END]
    forward = [p for p in used if not p % 2]
    skipped = min(forward) if forward else max(used)
    ranks = [rank for rank, place in sorted(places.items()) if place != skipped]
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}{' …' * (len(ranks) > 8)}"
    at, there = names[places[ranks[0]] // 2], min(rank for rank, place in places.items() if place == skipped)
    return (
        f"{who} skipped unit {names[skipped // 2]} in {'backward' if skipped % 2 else 'forward'}, and went on to "
        f"{at if at == END else f'unit {at}'}, where rank {there} computes it; call the same units in the same order on "
        "every rank, and multiply by 0 what shall not count"
    )
