"""A plan with a few of its equal blocks, which stand for all of them.

In the middle of a row of equal blocks each one does what the one before did. Who plays the operations of a step finds where that
begins (`SteadyBlocks`), counts the blocks that are left out there, and goes on: the result is that of all blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from fullshard.model.description import Description
from fullshard.model.reduced_description import unit_kinds, without_units
from fullshard.plan.plan import Plan
from fullshard.planner.step.memo import remembered
from fullshard.planner.step.schedule import Operation, schedule

COUNTS = (6, 12)  # blocks of a row to try: some plans take longer to become steady


@dataclass(frozen=True)
class FewBlocks:
    """`plan` and `description` without the middle of long rows of equal blocks. `rows`: of each block in such a row, the number
    of the row. `left_out`: blocks that each row lacks."""

    plan: Plan
    description: Description
    rows: dict[str, int]
    left_out: list[int]


def few_blocks(plan: Plan, description: Description, count: int, marked: Set[str] = frozenset()) -> FewBlocks | None:
    """The plan with `count` blocks of each row of equal ones; None if no row has as many more. `marked`: units that are unlike
    others."""
    make = lambda: _few_blocks(plan, description, count, marked)
    return remembered(description, "few blocks", plan, (count, frozenset(marked)), make)


def _few_blocks(plan: Plan, description: Description, count: int, marked: Set[str]) -> FewBlocks | None:
    rows: dict[str, int] = {}
    left_out: list[int] = []
    dropped: set[str] = set()
    for row in _rows(plan, description, marked):
        if len(row) < 2 * count:
            continue
        missing = len(row) - count
        middle = row[1 + count // 2 :][:missing]  # the ends stay: their neighbours are others
        rows |= dict.fromkeys([b.name for b in row if b not in middle], len(left_out))
        left_out.append(missing)
        dropped |= {name for block in middle for name in block.units}
    if not dropped:
        return None
    kept = replace(plan, units=tuple(u for u in plan.units if u.name not in dropped))
    less = remembered(description, "without", None, (frozenset(dropped),), lambda: without_units(description, dropped))
    return FewBlocks(kept, less, rows, left_out)


def schedules(
    plan: Plan,
    description: Description,
    micros: tuple[int, ...],
    *,
    marked: Set[str] = frozenset(),
    whole: bool = False,
    loss: str,
    clip: bool,
    engine: str,
) -> Iterator[tuple[FewBlocks | None, tuple[Operation, ...]]]:
    """The operations of a step of ever more blocks, and last of all: the first that become steady will do. `whole`: of all blocks
    at once. `marked`: units that are unlike others."""
    common: dict[str, Any] = {"loss": loss, "micros": micros, "clip": clip, "engine": engine}
    for count in () if whole else COUNTS:
        if few := few_blocks(plan, description, count, marked):
            yield few, schedule(few.plan, few.description, **common)
    yield None, schedule(plan, description, **common)


@dataclass
class _Block:
    """A block with the units in it. `kind`: the same of two blocks that are equal and treated alike."""

    name: str
    units: list[str]
    kind: list[object]


def _rows(plan: Plan, description: Description, marked: Set[str]) -> Iterator[list[_Block]]:
    """Equal blocks that follow each other and are treated alike."""
    kinds = _unit_kinds(plan, description)
    blocks = {u.name: _Block(u.name, [], []) for u in description.units if u.kind == "block"}
    order: list[_Block | None] = []
    for unit in plan.units:
        block = _block_of(unit.name, blocks)
        if block is not None:
            block.units.append(unit.name)
            block.kind.append((kinds[unit.name], unit.layout, unit.reshard, unit.remat, unit.home, unit.name in marked))
        if block is None or not order or order[-1] is not block:
            order.append(block)
    row: list[_Block] = []
    for block in [*order, None]:
        if row and (block is None or block.kind != row[0].kind):
            yield row
            row = []
        if block is not None:
            row.append(block)


def _block_of(unit: str, blocks: dict[str, _Block]) -> _Block | None:
    """The block that a unit is or lies in."""
    while unit and unit not in blocks:
        unit = unit.rpartition(".")[0]
    return blocks.get(unit)


def _unit_kinds(plan: Plan, description: Description) -> dict[str, int]:
    """The kind of each unit, as a number."""
    assert description.costs is not None
    costs = description.costs.on(plan.mesh)
    return remembered(description, "kinds", costs, (), lambda: _numbered(unit_kinds(description, costs)))


def _numbered(kinds: Mapping[str, object]) -> dict[str, int]:
    numbers: dict[object, int] = {}
    return {name: numbers.setdefault(kind, len(numbers)) for name, kind in kinds.items()}


class SteadyBlocks(ABC):
    """Watches the operations of few blocks, and lets those that are left out pass where a block is like the one before."""

    def __init__(self, few: FewBlocks):
        self.few = few
        self.running: tuple[object, ...] = ()  # the micro-batch, phase and row that the last block belonged to
        self.passed = True

    def at(self, op: Operation) -> bool:
        """Look at an operation before it is played. Return False if a row has ended in which no block was like the one before."""
        if op.kind != "compute" or op.phase not in ("forward", "backward") or op.unit not in self.few.rows:
            return True
        run = (op.micro, op.phase, self.few.rows[op.unit])
        first = run != self.running
        if first:
            if not self.passed:
                return False
            self.running, self.passed = run, False
        self.begin_block(first)
        if not self.passed and not first:
            self.passed = self.let_pass(self.few.left_out[run[2]])
        return True

    @abstractmethod
    def begin_block(self, first: bool) -> None:
        """A block begins; `first`: of its row."""

    @abstractmethod
    def let_pass(self, blocks: int) -> bool:
        """Let so many blocks pass, if the last two were alike."""
