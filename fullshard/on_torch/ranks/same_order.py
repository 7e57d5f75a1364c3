"""Whether all ranks issued the collectives of units in the same order, by three numbers in a sum that each step takes anyway.

Where units that ranks skip are of equal sizes, and as many on each rank, nothing fails: gathers and reductions of different units
pair up, and weights are mixed without a word. On a GPU the host does not wait for the sum. The step is skipped there on the
device, and the error comes two steps later, on all ranks in the same one.
"""

from collections import deque

import torch
from torch import Tensor

from fullshard.base.errors import FullshardError
from fullshard.on_torch.ranks.device_meshes import all_reduce_sum
from fullshard.on_torch.ranks.unit_log import LOG, skipped_unit

DIGEST = 2**18  # the squares of digests below this have an exact sum in fp64, over 2^17 ranks
MIXED = (
    "ranks issued the collectives of units in different orders; call the same units in the same order on every rank, and "
    "multiply by 0 what shall not count"
)


class SameOrder:
    """The orders of all ranks between two steps of one state."""

    def __init__(self, device: torch.device):
        self.device = device
        self.own = torch.zeros(3, dtype=torch.float64)
        self.under_way: deque[tuple[torch.cuda.Event, Tensor]] = (
            deque()
        )  # of each step of a GPU: summed, and whether orders differ

    def begin(self) -> None:
        """What was issued before is of no interest, as before a step."""
        LOG.digest = 0

    def summands(self) -> list[float]:
        """To be summed over ranks: 1, the digest of this rank's order, and its square."""
        digest = float(LOG.digest % DIGEST)
        self.begin()
        return [1.0, digest, digest * digest]

    def differ(self, own: Tensor, sums: Tensor) -> Tensor:
        """Whether orders differ, on every rank alike: digests are equal if each is their mean, and its square that of squares.
        On a CPU that raises. `own`: this rank's summands. `sums`: over all ranks."""
        found = (sums != sums[0] * own).any()
        if self.device.type != "cuda":
            _refuse(bool(found))
            return found
        on_host = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.under_way.append((event, on_host))
        return found

    def agree(self) -> None:
        """Raise, on all ranks alike, if orders differ since the last step: of a loop of the caller's own. Collective."""
        self.look()
        own = torch.tensor(self.summands(), dtype=torch.float64).to(self.device, non_blocking=True)
        self.differ(own, all_reduce_sum(own.clone()))

    def look(self, *, behind: int = 1) -> None:
        """Raise if orders differed in a step of a GPU, but for the newest `behind` steps."""
        while len(self.under_way) > behind:
            event, differed = self.under_way.popleft()
            event.synchronize()
            _refuse(bool(differed))


def _refuse(differed: bool) -> None:
    if differed:
        raise FullshardError(skipped_unit() or MIXED)
