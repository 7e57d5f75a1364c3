"""Whether all ranks did the same work in a step, by four numbers in a sum that each step takes anyway.

**Other units.** Where units that ranks skip are of equal sizes, and as many on each rank, nothing fails: gathers and reductions
of different units pair up, and weights are mixed without a word. The digest of a rank's order of collectives tells.

**Other parameters of a unit**, as experts without tokens. FSDP reduces those that have gradients as one vector, and would add
one parameter's to another's: each rank gives those that it has not used a gradient of zeros (`UnitCopies`). What no rank has
used must have none, or decay and momentum would move it. Only where some rank has borrowed zeros do ranks ask each other.

On a GPU the host does not wait for the sum. A step with other units is skipped on the device, and its error comes two steps
later, on all ranks in the same one. Whether zeros are borrowed is known after the first step, and of later ones two steps later.
"""

from collections import deque

import torch
from torch import Tensor

from fullshard.base.errors import FullshardError
from fullshard.on_torch.parallelize.weight_copies import WeightCopies
from fullshard.on_torch.ranks.device_meshes import all_reduce_sum
from fullshard.on_torch.ranks.unit_log import LOG, skipped_unit

DIGEST = 2**18  # the squares of digests below this have an exact sum in fp64, over 2^17 ranks
MIXED = (
    "ranks issued the collectives of units in different orders; call the same units in the same order on every rank, and "
    "multiply by 0 what shall not count"
)


class SameWork:
    """What the ranks compute between two steps of one state."""

    def __init__(self, copies: WeightCopies, device: torch.device):
        self.copies, self.device = copies, device
        self.borrows = False  # whether some rank has had parameters in a step that it did not use
        self.begun = False  # a step of the caller's own was made
        self.under_way: deque[tuple[torch.cuda.Event, Tensor]] = deque()  # of each step of a GPU: what the sum told

    def begin(self) -> None:
        """What was issued before is of no interest, as before a step."""
        LOG.digest = 0

    def summands(self) -> list[float]:
        """To be summed over ranks: 1, the digest of this rank's order, its square, and how many zeros this rank has borrowed."""
        digest = float(LOG.digest % DIGEST)
        self.begin()
        return [1.0, digest, digest * digest, float(sum(unit.unused() for unit in self.copies.units))]

    def differs(self, own: Tensor, sums: Tensor, *, wait: bool = False) -> Tensor:
        """Whether ranks computed other units, on every rank alike: digests are equal if each is their mean, and its square that
        of squares. On a CPU, and with `wait`, that raises. `own`: this rank's summands. `sums`: over all ranks."""
        other = (sums[:3] != sums[0] * own[:3]).any()
        told = torch.stack([other, sums[3] > 0])
        if self.device.type != "cuda" or wait:
            self._hear(told)
            return other
        on_host = torch.empty(2, dtype=torch.bool, pin_memory=True).copy_(told, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.under_way.append((event, on_host))
        return other

    def look(self) -> None:
        """Hear of all steps of a GPU but the last."""
        while len(self.under_way) > 1:
            event, told = self.under_way.popleft()
            event.synchronize()
            self._hear(told)

    def _hear(self, told: Tensor) -> None:
        other, borrowed = told.tolist()
        self.borrows |= borrowed
        if other:
            raise FullshardError(skipped_unit() or MIXED)

    def agree(self) -> None:
        """Before a step of the caller's own: raise if ranks computed other units; drop the gradients of parameters that none has
        used. Collective."""
        self.look()
        own = torch.tensor(self.summands(), dtype=torch.float64).to(self.device, non_blocking=True)
        self.differs(own, all_reduce_sum(own.clone()), wait=not self.begun)
        self.begun = True
        if self.borrows:
            self.drop_unused()
        self.copies.begin_step()

    def drop_unused(self) -> set[int]:
        """Drop the gradients of parameters that no rank has used since the last step. Returns whose they were, by `id`. Waits for
        the device. Collective."""
        units = self.copies.units
        mine = [float(sum(unit.unused() for unit in units)), *(float(used) for unit in units for used in unit.used)]
        borrowed, *counts = all_reduce_sum(torch.tensor(mine, device=self.device)).tolist()
        self.borrows |= borrowed > 0
        found: set[int] = set()
        for unit in units:
            of_unit, counts = counts[: len(unit.used)], counts[len(unit.used) :]
            found |= unit.drop_borrowed([count == 0 for count in of_unit])
        return found
