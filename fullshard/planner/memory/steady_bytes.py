"""Equal blocks of a step whose bytes are counted instead of played, once one block keeps what the one before kept."""

from typing import Any

from fullshard.planner.memory.allocation_tape import PeakGauge
from fullshard.planner.step.few_blocks import FewBlocks, SteadyBlocks
from fullshard.planner.step.saved_activations import SpilledBytes

Kept = tuple[int, int, dict[Any, int]]  # by a block: bytes on the device, those at its peak, and those spilled by place


class SteadyBytes(SteadyBlocks):
    """Counts the bytes that the blocks left out keep in forward and free in backward, and their peak, which is even from block to
    block. `highest`: of the step."""

    def __init__(self, few: FewBlocks, gauge: PeakGauge, spilled: SpilledBytes[Any]):
        super().__init__(few)
        self.gauge, self.spilled = gauge, spilled
        self.most = self.start = 0
        self.there: dict[Any, int] = {}  # spilled bytes as the block began
        self.seen: list[Kept] = []  # of each block of this row

    @property
    def highest(self) -> int:
        return max(self.most, self.gauge.highest)

    def begin_block(self, first: bool) -> None:
        gauge, there = self.gauge, dict(self.spilled.now)
        self.most = max(self.most, gauge.highest)
        spilled = {place: n - self.there.get(place, 0) for place, n in there.items()}
        self.seen = [] if first else [*self.seen, (gauge.now - self.start, gauge.highest - self.start, spilled)]
        self.start, self.there = gauge.now, there
        gauge.highest = gauge.now

    def let_pass(self, blocks: int) -> bool:
        if len(self.seen) < 2 or self.seen[-1] != self.seen[-2]:
            return False
        kept, peak, spilled = self.seen[-1]
        self.most = max(self.most, self.start - kept + blocks * kept + peak)  # of the last of them; the first was played
        self.start = self.gauge.now = self.gauge.highest = self.gauge.now + blocks * kept
        for place, each in spilled.items():
            self.spilled.now[place] += blocks * each
            self.spilled.most[place] = max(self.spilled.most[place], self.spilled.now[place])
        self.there = dict(self.spilled.now)
        return True
