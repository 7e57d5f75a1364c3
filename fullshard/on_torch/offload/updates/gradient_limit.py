"""The limit on gradients that wait on the device for their update, while backward makes more.

Lanes are usually slower than backward. Without a limit nearly all gradients of a model would wait at once. See *Who frees
gradients* in `tiered_optimizer`.
"""

from fullshard.on_torch.offload.units.unit_update import UnitUpdate


class GradientLimit:
    """The updates whose gradients are on the device, the oldest first. `limit`: their pieces, at most; None: any number."""

    def __init__(self, limit: int | None):
        self.limit, self.updates = limit, list[UnitUpdate]()

    def begin(self) -> None:
        self.updates = []

    def add(self, update: UnitUpdate) -> None:
        """Add an update that the lanes have; wait until the limit holds. A unit that is larger than the limit waits alone.
        The wait ends: lanes need nothing that comes later in backward, and a failed lane releases everything."""
        if self.limit is None or not update.unit.pieces:
            return
        self.updates.append(update)
        self.updates = [u for u in self.updates if not u.released()]
        while len(self.updates) > 1 and self.pieces() > self.limit:
            self.updates.pop(0).wait_released()
            self.updates = [u for u in self.updates if not u.released()]

    def pieces(self) -> int:
        """Pieces whose gradients wait."""
        return sum(len(update.unit.pieces) for update in self.updates)
