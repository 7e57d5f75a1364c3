"""How an update of optimizer state that rests away from the device is cut up: pieces, lanes, staging slots.

The engine works by these numbers and the planner counts by them. Standard library only.
"""

import itertools
from typing import Literal

from fullshard.direct_io import aligned_size
from fullshard.errors import FullshardError

Lane = Literal["cpu", "gpu"]

PIECE = 33 << 20  # elements: the most in a piece; above a power of two, as blocks often are by their norms
TOLD = 2  # bytes of a packed master that its parameter tells
GRAIN = 1024  # elements: pieces begin at multiples of it
STAGING = 4  # device slots that state is streamed through, unless a plan says otherwise
BACKLOG = 8  # pieces whose gradients wait on the device, where a search finds no room for all of them
TRAYS = 6  # pinned trays for the gradients of the CPU's pieces, and their new parameters
EIGHTHS = 8  # shares of the pieces are told in eighths, so that two runs on one machine seldom differ
DISK_SLOTS = 4  # pinned slots that state passes on its way between disk and device
READ_SLOTS = 2  # pinned slots for a unit's shard on its way from disk: one goes up while the next is read
WRITE_SLOTS = 4  # pinned slots for a piece's new parameters on their way to disk


def cut(elements: int) -> list[tuple[int, int]]:
    """(start, stop) of each piece of a flat shard: as even as whole grains allow, the last one with the odd end."""
    if elements == 0:
        return []
    count, grains = -(-elements // PIECE), -(-elements // GRAIN)
    each, more = divmod(grains, count)
    starts = [(i * each + min(i, more)) * GRAIN for i in range(count)]
    return list(zip(starts, [*starts[1:], elements], strict=True))


def deal(count: int, cpu_share: float) -> list[Lane]:
    """Who updates each of a rank's pieces, counted through all its units in the order of forward."""
    if not 0 <= cpu_share <= 1:
        raise FullshardError(f"cpu_share must be from 0 to 1, not {cpu_share!r}")
    dealt = [int(i * cpu_share + 0.5) for i in range(count + 1)]
    return ["cpu" if after > before else "gpu" for before, after in itertools.pairwise(dealt)]


def balanced(streamed: float, by_cores: float, sent: float) -> float:
    """The share of the pieces that the cores update so that they and the bus are done at about the same time, in eighths.

    Seconds a parameter while both are at work: of state over the bus and back, of an update by the cores, and of the
    gradient and the new parameter that such an update sends over the bus.
    """
    shares = [eighth / EIGHTHS for eighth in range(EIGHTHS + 1)]
    return min(shares, key=lambda share: max((1 - share) * streamed + share * sent, share * by_cores))


def filed(elements: int, moving: int, itemsize: int) -> int:
    """Bytes of a unit's shard in a file: its pieces, then what is frozen, each on pages of its own."""
    sizes = [stop - start for start, stop in cut(moving)]
    return sum(aligned_size(n * itemsize) for n in [*sizes, elements - moving])
