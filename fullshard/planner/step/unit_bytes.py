"""What the choices of a plan mean for the bytes of a unit: the one place where world size, homes, dtypes and wire are weighed.

Memory takes from here what is allocated, and time what is read and written.
"""

from functools import lru_cache

from fullshard.plan.plan import Plan
from fullshard.planner.step.offload_bytes import OffloadBytes
from fullshard.planner.step.quantized_wire import quantized_gather, quantized_reduce
from fullshard.planner.step.unit_sizes import UnitSizes, item


class UnitBytes:
    """The bytes of a plan's units. `gpu`: whether a GPU computes."""

    def __init__(self, plan: Plan, away: OffloadBytes, *, gpu: bool):
        self.plan, self.away, precision = plan, away, plan.precision
        self.compute, self.reduce, self.master = item(precision.compute), item(precision.reduce), item(precision.master)
        self.gather_passes = quantized_gather(plan.wire, self.compute, gpu=gpu)
        self.reduce_passes = quantized_reduce(plan.wire, self.reduce, gpu=gpu)
        resident = not all(sizes.away for sizes in away.groups.values())
        # With Adam, a GPU clips and updates resident units in one pass, unless the plan says otherwise.
        self.one_pass = gpu and resident and away.slots == 2 and plan.kernels.update != "torch"
        # Only that update takes gradients as they were computed.
        self.computed = self.one_pass and plan.keeps_computed_gradients

    def at_rest(self, sizes: UnitSizes) -> tuple[int, ...]:
        """Of each shard, where it is on the device."""
        return scaled(sizes.shards, self.compute if sizes.away else self.master)

    def casts(self, sizes: UnitSizes) -> bool:
        """True if shards are cast to another dtype before they are gathered."""
        return self.compute != self.master and not sizes.away

    def copied_in(self, sizes: UnitSizes) -> int:
        """Read and written before a gather, which takes offloaded shards as they are."""
        return 0 if sizes.away else sizes.held * self.master + sizes.shard_bytes(self.compute)

    def unpacked(self, sizes: UnitSizes) -> tuple[int, ...]:
        """Of each parameter that is ready to compute with. None where the shard is the whole, in the compute dtype."""
        is_whole = sizes.world == 1 and self.plan.mesh.tensor == 1 and sizes.away and sizes.home.params == "device"
        return () if is_whole else sizes.gathered_bytes(self.compute)

    def copied_out(self, sizes: UnitSizes) -> int:
        """Read and written to unpack them: out of a gather's buffer, out of offloaded shards, or in a cast of resident ones."""
        written = sum(self.unpacked(sizes))
        cast = sizes.world == 1 and not sizes.away
        return written + (sizes.held * self.master if cast else written)

    def kept_gradient(self, sizes: UnitSizes) -> int:
        """Of an element of a reduced gradient that waits for the update."""
        return self.away.gradient if sizes.away else self.compute if self.computed else self.master


@lru_cache(maxsize=4096)
def scaled(elements: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Bytes of tensors of so many elements, of `item` bytes each."""
    return tuple(n * item for n in elements)
