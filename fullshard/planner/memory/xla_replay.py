"""What a step needs that XLA compiles: the schedule's, less what XLA fuses away. Checked for one device; more are bounded."""

from functools import lru_cache

from fullshard.model.costs import Section
from fullshard.planner.memory.memory_replay import Replay
from fullshard.planner.memory.section_events import sized_events
from fullshard.planner.step.schedule import Operation
from fullshard.planner.step.unit_sizes import item

KEPT = "kept "  # before the name of a gradient that waits for the update


class XlaReplay(Replay):
    """Plays the operations of a step on JAX. Differences to torch:

    - The softmax of a chunk of the loss is an fp32 tensor beside its logits; torch's kernel works in place of them.
    - Where nothing is gathered, a unit's gradients stay as backward made them until the update, which casts them as it reads
      them. Those of several micro-batches are added up in the master's dtype. No reduction has an input of its own.
    - Workspaces of matrix products are among the temporaries, not kept.
    """

    def workspaces(self, *threads: str) -> None:
        pass

    def _compute(self, op: Operation) -> None:
        if op.phase == "chunk" and op.section is not None:
            self._add(op.unit, "softmax", _logits_bytes(op.section, op.shape[1]) // self.compute * item("fp32"), "loss")
        super()._compute(op)
        self._drop(op.unit, "softmax")

    def _reduce(self, op: Operation) -> None:
        sizes = self.units[op.unit]
        if sizes.world > 1 or sizes.away:
            super()._reduce(op)
            return
        made = [tensor for tensor, _ in self._gradients(sizes) if (op.unit, tensor) in self.tape.alive]
        if self.plan.batch.accumulate == 1:
            for tensor in made:
                self.tape.rename(op.unit, tensor, KEPT + tensor, "gradients", self.at)
            return
        self._drop_gradients(op.unit, made)
        if op.first:
            self._add(op.unit, "gradient", sizes.moving * self.master, "gradients")

    def _settle(self, op: Operation) -> None:
        sizes = self.units[op.unit]
        if sizes.world > 1 or sizes.away:
            super()._settle(op)

    def _zero(self, op: Operation) -> None:
        super()._zero(op)
        for owner, tensor in [key for key in self.tape.alive if key[1].startswith(KEPT)]:
            self._drop(owner, tensor)


@lru_cache(maxsize=256)
def _logits_bytes(section: Section, tokens: int) -> int:
    """Bytes of the largest tensor of a chunk's section: its logits."""
    return max(nbytes for action, _, _, nbytes in sized_events(section, 1, tokens) if action == "allocate")
