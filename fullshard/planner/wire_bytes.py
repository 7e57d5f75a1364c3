"""Bytes that one rank sends to others in a step, counted from the schedule's collectives. No seconds: `planner.time` has them.

Counted as a ring sends them. An all-gather or a reduce-scatter of `n` bytes over `N` ranks sends (N−1)/N · n a rank, an
all-reduce twice that. An all-to-all sends all but the rank's own part. A tree sends other amounts.
Quantised collectives count as the messages that they send.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.model.costs import AXIS_COLLECTIVES, evaluate
from fullshard.model.description import Description
from fullshard.plan.plan import Plan
from fullshard.planner.step.schedule import Operation, different_micro_batches, schedule
from fullshard.planner.time.collectives import wire

# The schedule's and the collective log's names of collectives, as `collectives.wire` has them.
COLLECTIVES = {"gather": "all_gather", "reduce": "reduce_scatter", "all_reduce": "all_reduce", "all_to_all": "all_to_all"}


@dataclass(frozen=True)
class WireBytes:
    """Bytes that one rank sends in a step, by purpose.

    `gather`: parameters. `reduce`: gradients to shards. `copies`: gradients between ranks that hold the same ones. `axis`:
    activations along a tensor or an expert axis. `agree`: token counts, norm and loss.
    """

    gather: float = 0.0
    reduce: float = 0.0
    copies: float = 0.0
    axis: float = 0.0
    agree: float = 0.0

    @property
    def total(self) -> float:
        return self.gather + self.reduce + self.copies + self.axis + self.agree


def sent_bytes(kind: str, nbytes: float, ranks: int) -> float:
    """Bytes that a rank sends in one collective of the schedule or of a collective log. `nbytes`: of the whole tensor."""
    return wire("ring", COLLECTIVES.get(kind, kind), nbytes, ranks)


def wire_bytes(
    plan: Plan, description: Description, *, loss: str = "chunked", clip: bool = True, engine: str = "torch"
) -> WireBytes:
    """Bytes that one rank of `plan` sends in a step. The model must be described with its costs."""
    shown = different_micro_batches(plan)
    repeats = {1: plan.batch.accumulate - len(shown) + 1}
    found = dict.fromkeys(WireBytes.__dataclass_fields__, 0.0)
    for operation in schedule(plan, description, loss=loss, micros=shown, clip=clip, engine=engine):
        for purpose, nbytes in _sent(plan, operation):
            found[purpose] += nbytes * repeats.get(operation.micro, 1)
    return WireBytes(**found)


def _sent(plan: Plan, operation: Operation) -> Iterable[tuple[str, float]]:
    if operation.kind == "compute":
        yield from _along_axis(plan, operation)
    elif operation.kind in COLLECTIVES:
        purpose = operation.kind if operation.kind != "all_reduce" else "copies" if operation.unit else "agree"
        yield purpose, sent_bytes(operation.kind, operation.sent or operation.nbytes, operation.ranks)


def _along_axis(plan: Plan, operation: Operation) -> Iterable[tuple[str, float]]:
    """Collectives inside a section: of the tensor axis, and the all-to-all of experts."""
    if plan.mesh.tensor * plan.mesh.expert == 1 or operation.section is None:
        return
    for op in operation.section.ops:
        if op.kind in AXIS_COLLECTIVES:
            ranks = plan.mesh.expert if op.kind == "all_to_all" else plan.mesh.tensor
            yield "axis", sent_bytes(op.kind, evaluate(op.moved, *operation.shape), ranks)
