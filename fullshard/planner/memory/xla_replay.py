"""What a step needs that XLA compiles: the schedule's, less what XLA fuses away. Checked for one device; more are bounded."""

from dataclasses import replace
from functools import lru_cache

from fullshard.model.costs import Section
from fullshard.planner.memory.replay import Replay
from fullshard.planner.memory.section_events import sized_events
from fullshard.planner.step.schedule import Operation

KEPT = "kept "  # before the name of a gradient that waits for the update


class XlaReplay(Replay):
    """Plays the operations of a step on JAX. Differences to torch:

    - The logits of a chunk of the loss are cast to fp32 inside the kernels that read them, so that there is one fp32 tensor of
      their size, the softmax, and not two.
    - Where nothing is gathered, a unit's gradients stay as backward made them until the update, which casts them as it reads
      them. Those of several micro-batches are added up in the master's dtype. No reduction has an input of its own.
    - Workspaces of matrix products are among the temporaries, not kept.
    """

    def workspaces(self, *threads: str) -> None:
        pass

    def _compute(self, op: Operation) -> None:
        if op.phase == "chunk" and op.section is not None:
            op = replace(op, section=_without_cast(op.section, op.tokens))
        super()._compute(op)

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
def _without_cast(section: Section, tokens: int) -> Section:
    """The section of a chunk without the first of its largest tensors, if there are several: the logits in fp32."""
    sizes = {tensor: nbytes for action, tensor, _, nbytes in sized_events(section, 1, tokens) if action == "allocate"}
    largest = [tensor for tensor, nbytes in sizes.items() if nbytes == max(sizes.values())]
    if len(largest) < 2:
        return section
    return replace(section, events=tuple(e for e in section.events if e.tensor != largest[0]))
