"""The best plan there is: of every strategy, mesh, micro-batch and remat choice that fits, the one with the most tokens a
second, with parts away from the device where that is faster or nothing else fits."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fullshard.base.errors import checked_call
from fullshard.base.text import counted, seconds_text
from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.plan.optimizer import AdamW, Optimizer
from fullshard.plan.plan import Plan
from fullshard.planner.device_limits import refuse_float8_device
from fullshard.planner.estimate import Estimate, refuse_uncosted
from fullshard.planner.search.alternatives import Alternative, alternatives, nothing_fits
from fullshard.planner.search.pick import pick
from fullshard.planner.search.plan_space import (
    engine_for,
    plan_request,
    precision_of,
    refuse_choices_of_torch,
    refuse_idle_backlog,
    refuse_idle_loss_kernel,
)


@dataclass(frozen=True)
class SearchResult:
    """The best plan and what it costs; unpacks as `plan, estimate = find_plan(…)`."""

    plan: Plan
    estimate: Estimate
    search_seconds: float
    considered: int
    engine: str = "torch"  # which carries the plan out
    strategy: str = ""  # the plan's, by name
    others: Callable[[], list[Alternative]] = field(default=list, repr=False)

    @cached_property
    def alternatives(self) -> list[Alternative]:
        """The best plan of each other strategy with everything on the device, and why it lost. Found when they are asked for."""
        return self.others()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.plan, self.estimate))


# Measured on an H200: benchmarks/results/2026-11-17-jax-memory-h200.json and that of 2026-11-18
ON_JAX = (
    "carried out by the JAX engine (--engine jax); on one H200, estimates of its memory were 3% too low to 6% too high with the "
    "chunked loss, its time 4% and 7% too short; with the plain one both are too high, by 40% and 25%"
)
CALL = "find_plan(on_torch.describe(model, micro_batch=1, sequence=4096), Cluster.load('8xh200'))"


@checked_call(CALL, description=Description, cluster=Cluster)
def find_plan(
    description: Description,
    cluster: Cluster,
    *,
    sequence: int | None = None,
    global_batch: int | None = None,
    fix: dict[str, Any] | None = None,
    limit: int | None = None,
    loss: str = "chunked",
    optimizer: Optimizer | None = None,
    clip: bool = True,
    disk: bool = True,
    engine: str | None = None,
    check: Callable[[], None] | None = None,
) -> SearchResult:
    """Find the fastest plan for `description` on `cluster` that fits, with its estimate and why others lost.

    `fix` pins any choice (`{"strategy": "zero3", "remat": "full"}`). `limit`: bytes of a device to use. `sequence` and
    `global_batch`: by default those the model was described with, one micro-batch a rank. `clip`: whether gradients are
    clipped. `disk`: whether bytes may go to disk if nothing else fits. `engine`: which shall carry the plan out; by default
    torch, but JAX for TPUs. `check`: called between estimates; what it raises ends the search.
    """
    began = time.perf_counter()
    refuse_uncosted(description)
    request = plan_request(description, cluster, sequence, global_batch, fix or {}, limit, loss, optimizer or AdamW())
    chosen = engine_for(cluster, engine)
    request = replace(request, clip=clip, disk=disk and chosen == "torch", engine=chosen, check=check or request.check)
    refuse_idle_backlog(request)
    refuse_choices_of_torch(request)
    refuse_idle_loss_kernel(request)
    refuse_float8_device(precision_of(request), cluster)
    found = pick(request)
    best = found.best
    if best.result.estimate is None:
        raise nothing_fits(request, best)
    return SearchResult(
        best.result.plan,
        best.result.estimate,
        time.perf_counter() - began,
        found.considered,
        chosen,
        best.strategy.name,
        lambda: alternatives(request, best, found.others()),
    )


def summary(found: SearchResult) -> str:
    """The strategy that was chosen, of how many plans, and a line for each alternative with the reason why it lost."""
    lines = [f"{a.label}: {a.reason}" for a in found.alternatives]
    considered = f"{counted(found.considered, 'plan')} considered in {seconds_text(found.search_seconds)}"
    chosen = f"{found.strategy}, chosen from {considered}"
    head = f"{chosen}; with everything on the device, the others:" if lines else chosen
    return "\n".join([*([ON_JAX] if found.engine == "jax" else []), head, *[f"  {line}" for line in lines]])
