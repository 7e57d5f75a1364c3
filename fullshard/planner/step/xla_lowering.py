"""What operations do in a step that XLA compiles, which fuses some away. Checked for one device; more are bounded."""

from collections.abc import Iterator
from functools import lru_cache

from fullshard.model.costs import Section
from fullshard.plan.engine_traits import TRAITS
from fullshard.plan.plan import Plan
from fullshard.planner.step.effects import Allocate, Effects, Event, Free, Rename
from fullshard.planner.step.lowering import NOTHING, Lowering
from fullshard.planner.step.offload_bytes import OffloadBytes
from fullshard.planner.step.schedule import Operation
from fullshard.planner.step.unit_sizes import UnitSizes, item

KEPT = "kept "  # before the name of a gradient that waits for the update


class XlaLowering(Lowering):
    """Differences to torch:

    - The softmax of a chunk of the loss is an fp32 tensor beside its logits; torch's kernel works in place of them.
    - Where nothing is gathered, a unit's gradients stay as backward made them until the update, which casts them as it reads
      them. Those of several micro-batches are added up in the master's dtype. No reduction has an input of its own.
    """

    def _compute(self, op: Operation) -> Effects:
        found = super()._compute(op)
        if op.phase != "chunk" or op.section is None:
            return found
        softmax = _logits_bytes(op.section, op.shape[1]) // self.compute * item("fp32")
        return Effects((Allocate(op.unit, "softmax", softmax, "loss"), *found.events, Free(op.unit, "softmax")))

    def _reduces(self, op: Operation, sizes: UnitSizes) -> Iterator[Event]:
        return self._stays(op, sizes) if _is_whole(sizes) else super()._reduces(op, sizes)

    def _takes(self, op: Operation, sizes: UnitSizes, as_it_is: bool) -> Iterator[Event]:
        return self._stays(op, sizes)

    def _stays(self, op: Operation, sizes: UnitSizes) -> Iterator[Event]:
        names = [tensor for tensor, _ in self._gradients(sizes)]
        if self.plan.batch.accumulate == 1:
            for tensor in names:
                yield Rename(op.unit, tensor, KEPT + tensor, "gradients")
            return
        yield self._drop_gradients(op.unit, names)
        if op.first:
            yield Allocate(op.unit, "gradient", sizes.moving * self.master, "gradients")

    def _settle(self, op: Operation) -> Effects:
        return NOTHING if _is_whole(self.units[op.unit]) else super()._settle(op)

    def _zeroed(self, sizes: UnitSizes) -> Iterator[Event]:
        yield from super()._zeroed(sizes)
        yield from (Free(sizes.name, KEPT + tensor) for tensor, _ in self._gradients(sizes))


def _is_whole(sizes: UnitSizes) -> bool:
    return sizes.world == 1 and not sizes.away


@lru_cache(maxsize=256)
def _logits_bytes(section: Section, tokens: int) -> int:
    """Bytes of the largest tensor of a chunk's section: its logits."""
    return max(n for e in section.events if e.rule or e.action == "allocate" for n in e.sizes(1, tokens))


def lowering(plan: Plan, away: OffloadBytes, *, engine: str, gpu: bool = True) -> Lowering:
    """Lowers the operations of a plan's steps on an engine. `gpu`: whether a GPU computes."""
    kind = XlaLowering if TRAITS[engine].one_program else Lowering
    return kind(plan, away, gpu=gpu)
