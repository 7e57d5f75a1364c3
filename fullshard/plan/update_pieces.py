"""How updates of offloaded optimizer state are divided: pieces, lanes, staging buffers.

Engine and planner use the same numbers. Standard library only.
"""

import itertools
from typing import Literal

from fullshard.base.direct_io import aligned_size
from fullshard.base.errors import FullshardError

Lane = Literal["cpu", "gpu"]

PIECE = 33 << 20  # elements of a piece, at most; above a power of two, as the norms of a block often add a few
TOLD = 2  # bytes of an fp32 master that its bf16 parameter holds
GRAIN = 1024  # elements: pieces begin at multiples of it
STAGING = 4  # default device slots for state that the GPU updates
BACKLOG = 8  # pieces whose gradients wait on the device, if a search finds no room for all of them
CPU_BUFFERS = 6  # pinned buffers for the gradients of the CPU's pieces, and their new parameters
EIGHTHS = 8  # the CPU's share is rounded to eighths, so that two runs on one machine seldom differ
DISK_SLOTS = 4  # pinned buffers for a piece's state between disk and device
READ_SLOTS = 2  # pinned buffers for a unit's shard from disk: one is copied to the device while the next is read
WRITE_SLOTS = 4  # pinned buffers for a piece's new parameters on their way to disk


# Elements a second that one core updates in few bits, by the kind of the moments: with a master rounded to the nearest value,
# and stochastically. Torch's passes over chunks in the cache are bound by arithmetic, an fp32 AdamW by memory.
LOW_BIT_RATES = {"fp32": (1.1e8, 6.2e7), "bf16": (7.9e7, 4.8e7), "int8": (2.8e7, 2.3e7)}


def update_cores(cores: int) -> int:
    """Of a rank's cores, those that update: less some for the threads that queue work. Fewer cores than all saturate the host's
    memory."""
    return max(1, cores - max(2, 3 * cores // 8))


def low_bit_seconds(moments: str, cores: int, *, stochastic: bool) -> float:
    """Seconds an element of an update in few bits by a rank with so many cores, at least."""
    return 1 / (LOW_BIT_RATES[moments][stochastic] * update_cores(cores))


def cut(elements: int) -> list[tuple[int, int]]:
    """(start, stop) of each piece of a flat shard. Pieces differ by at most one grain; the last one has the remainder."""
    if elements == 0:
        return []
    count, grains = -(-elements // PIECE), -(-elements // GRAIN)
    each, more = divmod(grains, count)
    starts = [(i * each + min(i, more)) * GRAIN for i in range(count)]
    return list(zip(starts, [*starts[1:], elements], strict=True))


def deal(count: int, cpu_share: float) -> list[Lane]:
    """The lane of each of a rank's pieces, in forward order."""
    if not 0 <= cpu_share <= 1:
        raise FullshardError(f"cpu_share must be from 0 to 1, not {cpu_share!r}")
    dealt = [int(i * cpu_share + 0.5) for i in range(count + 1)]
    return ["cpu" if after > before else "gpu" for before, after in itertools.pairwise(dealt)]


def balanced(streamed: float, by_cores: float, sent: float) -> float:
    """The share of pieces that the CPU updates so that CPU and PCIe finish at about the same time, in eighths.

    All arguments are seconds an element while both are busy: `streamed` of state over PCIe and back, `by_cores` of an update
    by the CPU, `sent` of the gradient and new parameter that such an update sends over PCIe.
    """
    shares = [eighth / EIGHTHS for eighth in range(EIGHTHS + 1)]
    return min(shares, key=lambda share: max((1 - share) * streamed + share * sent, share * by_cores))


def shard_file_bytes(elements: int, moving: int, itemsize: int) -> int:
    """Bytes of a unit's shard in a file: its pieces, then the frozen parameters, each on whole pages."""
    sizes = [stop - start for start, stop in cut(moving)]
    return sum(aligned_size(n * itemsize) for n in [*sizes, elements - moving])
