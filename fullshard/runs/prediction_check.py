"""Compare what the planner predicted for a run with what it measures."""

import statistics
from dataclasses import dataclass
from typing import Protocol

from fullshard.base.text import bytes_text, seconds_text
from fullshard.engine.trainer import RunState
from fullshard.planner.estimate import Estimate
from fullshard.planner.remedies import advice
from fullshard.runs.prepare.prepare import Prepared
from fullshard.runs.prepare.recipe_plan import step_seconds

FIRST, LAST = 3, 8  # steps that are looked at: the first ones warm up
MEMORY, TIME = 0.03, 0.15  # shares by which a prediction may be off before it is called wrong
HOST = 0.03  # and of a step, what the host's pace has to change before it is told
LOOKS = 3  # at the host, a step


class IssuingHost(Protocol):
    """How fast the host issues work to the device.

    `look`: how many times slower than the cluster's host it is now. `step`: the step time at that pace. `between`: look
    between steps, since a shared host changes within seconds, or only after the last. `measured`: the cluster file is of this
    machine.
    """

    @property
    def between(self) -> bool: ...

    @property
    def measured(self) -> bool: ...

    def look(self) -> float: ...

    def step(self, share: float) -> float: ...


class Verdict:
    """Collects a few steps, then says once how good the prediction was. `own_kernels`: False if another engine trains than
    the one whose kernels and allocator are predicted."""

    def __init__(self, expected: Estimate, host: IssuingHost, *, own_kernels: bool = True):
        self.expected, self.host, self.own_kernels = expected, host, own_kernels
        self.seconds: list[float] = []
        self.shares: list[float] = []
        self.peak = 0
        self.steps = 0
        self.numbers: dict[str, float | int] = {}

    def add(self, seconds: float, memory: dict[str, int]) -> str | None:
        """Record a step. Returns the verdict after the last one that counts."""
        self.steps += 1
        if self.steps >= FIRST:
            self.seconds.append(seconds)
            self.peak = max(self.peak, memory["memory_allocated"])
        on_gpu = "memory_reserved" in memory
        if on_gpu and (FIRST <= self.steps <= LAST if self.host.between else self.steps == LAST):
            self.shares.append(self.host.look())
        return self._say(on_gpu) if self.steps == LAST else None

    def _say(self, on_gpu: bool) -> str:
        e, seconds = self.expected, statistics.median(self.seconds)
        self.numbers = {"predicted_seconds": e.step_seconds, "measured_seconds": seconds}
        words, predicted = f"a step takes {seconds_text(seconds)}, predicted {seconds_text(e.step_seconds)}", e.step_seconds
        if on_gpu:
            share = statistics.median(self.shares)
            predicted = self.host.step(share)
            self.numbers |= {"host_share": share, "predicted_with_this_host": predicted}
            if abs(predicted / e.step_seconds - 1) > HOST:
                words += f", {seconds_text(predicted)} with the host as it is, at {1 / share:.2f} of the cluster's pace"
        slow, large = abs(predicted / seconds - 1) > TIME, False  # a CPU's allocator keeps no count
        if on_gpu:
            self.numbers |= {"predicted_allocated": e.device.allocated_bytes, "measured_allocated": self.peak}
            words += f"; peak {bytes_text(self.peak)}, predicted {bytes_text(e.device.allocated_bytes)}"
            large = abs(e.device.allocated_bytes / self.peak - 1) > MEMORY
        if not slow and not large:
            return words
        if not self.own_kernels:
            return f"{words}: the prediction is of torch's kernels and allocator, and XLA has its own"
        return f"{words}: {self._advice(slow=slow, large=large)}"

    def _advice(self, *, slow: bool, large: bool) -> str:
        """What to do about a wrong prediction. A measurement of this machine changes the predicted seconds, not the bytes."""
        again = "times this machine anew" if self.host.measured else "makes a cluster file of this machine"
        timed = f"the predicted time is off; `fullshard measure` {again} for plan.cluster"
        share = self.expected.device.allocated_bytes / self.peak - 1 if large else 0.0
        held = f"the predicted memory is {abs(share):.0%} too {'low' if share < 0 else 'high'}, whatever the cluster file"
        return "; ".join(said for said, wanted in ((timed, slow), (held, large)) if wanted)


@dataclass
class ThisHost:
    """This rank's host. Offloaded updates run on during the next step, so that looks between steps would wait for them."""

    prepared: Prepared
    state: RunState

    @property
    def between(self) -> bool:
        return not self.state.updates_overlap

    @property
    def measured(self) -> bool:
        return self.prepared.cluster.measured is not None

    def look(self) -> float:
        cluster, share = self.prepared.cluster, self.prepared.engine.machine.host_share
        return share(self.state, cluster.of("issued"), cluster.of("quiet"), LOOKS) if share else 1.0

    def step(self, share: float) -> float:
        p = self.prepared
        assert p.description is not None
        return step_seconds(p.recipe, p.plan, p.description, p.cluster.with_host(share))


def explain_out_of_memory(prepared: Prepared, state: RunState) -> str:
    """The prediction, and the remedies of the planner with the cost of each."""
    recipe, plan, description = prepared.recipe, prepared.plan, prepared.description
    expected = prepared.estimate
    said = f" (predicted: {bytes_text(expected.needed)} of {bytes_text(expected.available)})" if expected else ""
    if description is None or description.costs is None:
        helps = "use plan.remat = 'full', a smaller train.micro_batch or more devices"
    else:
        clip = recipe.optim.clip is not None
        helps = advice(plan, description, prepared.cluster, loss=recipe.loss, clip=clip)
    return f"out of memory in step {state.step + 1}{said}; {helps}"
