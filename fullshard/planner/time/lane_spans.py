"""When each lane of a step is busy, and with what: the timeline of `timeline` as intervals, for a picture of it.

At the mean pace of the host. On shared hosts the estimate is the mean over three paces, so its step time can differ a little.
"""

from dataclasses import dataclass, replace

from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import Plan
from fullshard.planner.step.effects import Collective, Effects
from fullshard.planner.step.phases import BACKWARD, LOSS
from fullshard.planner.step.schedule import Operation, different_micro_batches
from fullshard.planner.time.step_lanes import StepLanes
from fullshard.planner.time.timeline import lowered_step, play

MOST_MICRO_BATCHES = 4  # are drawn one by one; of more, the first two and the last
GAP = 1 / 4000  # of a step: work of one kind for one unit that is nearer than this is one span


@dataclass(frozen=True)
class Span:
    """A lane is busy with `what` for `unit` from `start` to `end`, in seconds since the step began."""

    lane: str
    what: str
    unit: str
    start: float
    end: float


@dataclass(frozen=True)
class StepSpans:
    """The spans of a step, by start. `left_out`: micro-batches like the second that are not among them."""

    spans: list[Span]
    seconds: float
    left_out: int


def lane_spans(
    plan: Plan,
    description: Description,
    cluster: Cluster,
    *,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    clip: bool = True,
    cpu_share: float | None = None,
) -> StepSpans:
    """The spans of one step of `plan` on `cluster`; arguments as of `timeline`."""
    every = tuple(range(plan.batch.accumulate))
    micros = every if len(every) <= MOST_MICRO_BATCHES else different_micro_batches(plan)
    away, step = lowered_step(plan, description, cluster, micros, loss, optimizer, clip, cpu_share)
    lanes = _RecordedLanes(plan, cluster, away)
    play(lanes, step)
    seconds = lanes.finish(repeats=0, spread=0.0).seconds
    found = sorted((*lanes.spans, *_transfers(lanes)), key=lambda s: s.start)
    inside = [s for span in found if (s := _within(span, lanes.began, seconds)) is not None]
    return StepSpans(_joined(inside, GAP * seconds), seconds, len(every) - len(micros))


class _RecordedLanes(StepLanes):
    """Lanes that remember what was placed on them in the last step."""

    spans: list[Span]
    operation: Operation

    def begin(self) -> None:
        super().begin()
        self.spans = []

    def run(self, op: Operation, effects: Effects) -> None:
        self.operation = op
        super().run(op, effects)

    def _on_compute(self, seconds: float, kind: str, kernels: float = 1.0) -> None:
        slowdown = self.slowdown
        super()._on_compute(seconds, kind, kernels)
        self._record("compute", seconds + slowdown - self.slowdown, self.free["compute"], self._phase())

    def _collective(self, wanted: Collective | None, earliest: float) -> float:
        assert wanted is not None
        before = self.found.busy[wanted.lane]
        end = super()._collective(wanted, earliest)
        self._record(wanted.lane, self.found.busy[wanted.lane] - before, end, wanted.kind.replace("_", "-"))
        return end

    def _inside(self, seconds: float) -> None:
        super()._inside(seconds)
        lane = "experts" if self.plan.mesh.expert > 1 else "tensor"
        self._record(lane, seconds, self.free[lane], "collectives inside the layer")

    def _phase(self) -> str:
        """What compute does, in the words of a step."""
        op = self.operation
        if op.kind in ("norm", "update"):
            return "update"
        if op.kind != "compute":
            return "copies"
        return "backward" if op.phase in BACKWARD else "loss" if op.phase in LOSS else "forward"

    def _record(self, lane: str, seconds: float, end: float, what: str) -> None:
        if seconds > 0:
            self.spans.append(Span(lane, what, self.operation.unit, end - seconds, end))


def _transfers(lanes: StepLanes) -> list[Span]:
    """When PCIe, the host's cores and the disk are busy. Their work is placed in pieces, which are not told apart."""
    found = lanes.transfers.lanes.items()
    return [Span(lane, "offload", "", a, b) for lane, times in found for a, b in zip(times.starts, times.ends, strict=True)]


def _within(span: Span, began: float, seconds: float) -> Span | None:
    """The part of a span that is in the step, which lasts `seconds` from `began` on."""
    start, end = max(span.start - began, 0.0), min(span.end - began, seconds)
    return replace(span, start=start, end=end) if end > start else None


def _joined(spans: list[Span], gap: float) -> list[Span]:
    """Neighbours on a lane that do the same for the same unit, as one."""
    last: dict[str, int] = {}  # of each lane, the place of its last span
    found: list[Span] = []
    for span in spans:
        before = found[last[span.lane]] if span.lane in last else None
        if before and (before.what, before.unit) == (span.what, span.unit) and span.start - before.end <= gap:
            found[last[span.lane]] = replace(before, end=max(before.end, span.end))
        else:
            last[span.lane] = len(found)
            found.append(span)
    return found
