"""A model of CUDA's caching allocator with its default settings: the segments that it reserves for a tape.

Requests are rounded to 512 bytes; those up to 1 MiB come from segments of 2 MiB, those below 10 MiB from
segments of 20 MiB, larger ones from segments of their own size; a free block is the best fit of its stream,
split when enough is left, merged with its free neighbours. (CUDACachingAllocator.cpp)

Of free blocks that fit equally well it takes the one at the lowest address. The driver maps each new segment below the
last one. It maps a segment above only into a hole of returned memory, which a process has that trained another model before.
"""

from bisect import bisect_left, insort
from collections import defaultdict

GRAIN = 512  # bytes: sizes are rounded up to multiples
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE, LARGE_SEGMENT = 10 << 20, 20 << 20
ROUND = 2 << 20


class _Block:
    """A part of a segment, free or allocated."""

    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: tuple[int, bool]):
        self.address, self.size, self.pool = address, size, pool
        self.before: _Block | None = None
        self.after: _Block | None = None
        self.free = False


class Allocator:
    """Bytes allocated and reserved, now and at their highest."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak = self.peak_reserved = 0
        self.lowest = 1 << 60
        # By (stream, small): free blocks by size, then by address.
        self.pools: defaultdict[tuple[int, bool], list[tuple[int, int, _Block]]] = defaultdict(list)

    def allocate(self, nbytes: int, stream: int) -> _Block:
        size = nbytes // -GRAIN * -GRAIN
        pool = (stream, size <= SMALL)
        free = self.pools[pool]
        i = bisect_left(free, (size, 0))
        if i == len(free):
            block = self._segment(size, pool)
        else:
            block = free.pop(i)[2]
            block.free = False
        left = block.size - size
        if left > SMALL or (left >= GRAIN and pool[1]):
            self._split(block, size, free)
        self.allocated += block.size
        if self.allocated > self.peak:
            self.peak = self.allocated
        return block

    def free(self, block: _Block) -> None:
        self.allocated -= block.size
        free = self.pools[block.pool]
        before, after = block.before, block.after
        if before is not None and before.free:  # it becomes part of the block
            del free[bisect_left(free, (before.size, before.address))]
            block.address, block.size, block.before = before.address, block.size + before.size, before.before
            if before.before is not None:
                before.before.after = block
        if after is not None and after.free:
            del free[bisect_left(free, (after.size, after.address))]
            block.size, block.after = block.size + after.size, after.after
            if after.after is not None:
                after.after.before = block
        block.free = True
        insort(free, (block.size, block.address, block))

    def _segment(self, size: int, pool: tuple[int, bool]) -> _Block:
        segment = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT if size < LARGE else -(-size // ROUND) * ROUND
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.lowest -= segment + ROUND  # segments never touch
        return _Block(self.lowest, segment, pool)

    def _split(self, block: _Block, size: int, free: list[tuple[int, int, _Block]]) -> None:
        rest = _Block(block.address + size, block.size - size, block.pool)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        rest.free = True
        insort(free, (rest.size, rest.address, rest))


def replay(
    deltas: list[int], tensors: list[int], streams: list[int], starts: list[int], *, alike: bool = False
) -> list[tuple[int, int]]:
    """Peaks of (allocated, reserved) for each stretch of a tape. Stretches begin at `starts`.

    `alike`: the last stretch repeats the one before. It is skipped if that one left the allocator as it found it.
    """
    allocator = Allocator()
    blocks: dict[int, _Block] = {}
    found: list[tuple[int, int]] = []
    before = None
    for begin, end in zip(starts, [*starts[1:], len(deltas)], strict=True):
        if alike and len(found) == len(starts) - 2:
            before = _layout(allocator, blocks)
        elif before is not None and before == _layout(allocator, blocks):
            return [*found, found[-1]]
        allocator.peak, allocator.peak_reserved = allocator.allocated, allocator.reserved
        allocate, free, pop = allocator.allocate, allocator.free, blocks.pop
        for delta, number, stream in zip(deltas[begin:end], tensors[begin:end], streams[begin:end], strict=True):
            if number and delta > 0:
                blocks[number] = allocate(delta, stream)
            elif number:
                free(pop(number))
        found.append((allocator.peak, allocator.peak_reserved))
    return found


def _layout(allocator: Allocator, blocks: dict[int, _Block]) -> tuple[object, ...]:
    """The allocator's state: all that its further behaviour depends on."""
    pools = {pool: [block[:2] for block in free] for pool, free in allocator.pools.items() if free}
    return pools, [(b.address, b.size) for _, b in sorted(blocks.items())], allocator.reserved
