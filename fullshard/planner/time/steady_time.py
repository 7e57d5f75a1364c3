"""Equal blocks of a step that are counted instead of played, once one block takes what the one before took."""

from dataclasses import dataclass

from fullshard.planner.step.few_blocks import FewBlocks, SteadyBlocks
from fullshard.planner.time.step_lanes import StepLanes

Table = dict[str, float]


@dataclass(frozen=True)
class Snapshot:
    """Where all lanes stand as a block begins to compute, and the seconds counted until then."""

    compute: float
    lanes: tuple[float, ...]
    pending: tuple[float, ...]  # when the gathers under way are done
    slowdown: float
    tables: tuple[Table, ...]


class SteadyTime(SteadyBlocks):
    """Lets time pass for the blocks that are left out.

    That is exact. A block depends on where the lanes stand relative to compute. Each lane must move with compute, or be behind it
    and slower: then no later block sees it.
    """

    def __init__(self, few: FewBlocks, lanes: StepLanes):
        super().__init__(few)
        self.lanes = lanes
        self.seen: list[Snapshot] = []

    def begin_block(self, first: bool) -> None:
        if not self.passed:
            self.seen = [*([] if first else self.seen[-2:]), self._snapshot()]

    def _snapshot(self) -> Snapshot:
        at = self.lanes
        stand = (*at.free.values(), *at.links.values(), at.host, at.unpacked)
        tables = tuple(dict(table) for table in (at.found.busy, at.found.exposed, at.found.compute))
        return Snapshot(at.free["compute"], stand, tuple(at.ready.values()), at.slowdown, tables)

    def let_pass(self, blocks: int) -> bool:
        if len(self.seen) < 3 or not _is_steady(*self.seen):
            return False
        at, before, now = self.lanes, *self.seen[1:]
        moved = iter([b + blocks * (b - a) for a, b in zip(before.lanes, now.lanes, strict=True)])
        at.free = {lane: next(moved) for lane in at.free}
        at.links = {link: next(moved) for link in at.links}
        at.host, at.unpacked = moved
        later = blocks * (now.compute - before.compute)
        at.ready = {unit: seconds + later for unit, seconds in at.ready.items()}
        at.reduced = {unit: seconds + later for unit, seconds in at.reduced.items()}
        at.slowdown += blocks * (now.slowdown - before.slowdown)
        for table, old in zip((at.found.busy, at.found.exposed, at.found.compute), before.tables, strict=True):
            for key in table:
                table[key] += blocks * (table[key] - old.get(key, 0.0))
        return True


def _is_steady(first: Snapshot, second: Snapshot, third: Snapshot) -> bool:
    """True if every later block will do what the last did."""
    rounding = 1e-13 + 1e-14 * third.compute
    step = third.compute - second.compute
    if abs(step - (second.compute - first.compute)) > rounding or len({len(s.pending) for s in (first, second, third)}) > 1:
        return False
    for a, b, c in zip(first.lanes, second.lanes, third.lanes, strict=True):
        with_compute = abs(c - b - step) <= rounding
        behind = c <= third.compute and c - b < step
        if abs((c - b) - (b - a)) > rounding or not (with_compute or behind):
            return False
    if any(abs(c - b - step) > rounding for b, c in zip(second.pending, third.pending, strict=True)):
        return False
    grows = third.slowdown - second.slowdown
    return grows > -rounding and abs(grows - (second.slowdown - first.slowdown)) <= rounding
