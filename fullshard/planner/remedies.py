"""Changes that make a plan need less memory, with what each saves and costs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text
from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.plan.plan import Plan, Unit
from fullshard.planner.estimate import cores_share, host_available
from fullshard.planner.memory.peak_memory import predict
from fullshard.planner.time.timeline import timeline


@dataclass(frozen=True)
class Remedy:
    """A change in words, the bytes that are then allocated, and by which share a step takes longer."""

    words: str
    needed: int
    slower: float

    def __str__(self) -> str:
        cost = f"{self.slower:.0%} slower" if self.slower > 0.005 else "no slower"
        return f"{self.words} ({bytes_text(self.needed)}, {cost})"


def remedies(plan: Plan, description: Description, cluster: Cluster, *, loss: str = "chunked", clip: bool = True) -> list[Remedy]:
    """Single changes that need less memory, the cheapest in time first."""
    common: dict[str, Any] = {"clip": clip, "cpu_share": cores_share(plan, cluster)}
    before = predict(plan, description, loss=loss, reserved=False, **common).allocated
    seconds = timeline(plan, description, cluster, loss=loss, **common).seconds
    found = []
    blocks = {u.name for u in description.units if u.kind == "block"}
    for words, other, its_loss in _changes(plan, blocks, loss):
        peak = predict(other, description, loss=its_loss, reserved=False, **common)
        if peak.allocated < 0.99 * before and sum(peak.host.values()) <= host_available(cluster, peak.allocated):
            slower = timeline(other, description, cluster, loss=its_loss, **common).seconds / seconds - 1
            found.append(Remedy(words, peak.allocated, slower))
    return sorted(found, key=lambda r: (round(r.slower, 2), r.needed))


def _changes(plan: Plan, blocks: set[str], loss: str) -> Iterator[tuple[str, Plan, str]]:
    if loss == "plain":
        yield "train.loss = 'chunked'", plan, "chunked"
    for remat in ("selective", "full"):
        units = tuple(replace(u, remat=remat) if u.name in blocks else u for u in plan.units)
        if units != plan.units:
            yield f"plan.remat = '{remat}'", replace(plan, units=units), loss
    if plan.batch.micro_batch > 1 and plan.batch.micro_batch % 2 == 0:
        yield f"train.micro_batch = {plan.batch.micro_batch // 2}", _halved(plan), loss
    if any(u.layout == "sharded" and u.reshard is False for u in plan.units) and plan.mesh.shard > 1:
        units = tuple(replace(u, reshard=True) if u.layout == "sharded" else u for u in plan.units)
        yield "plan.strategy = 'zero3'", replace(plan, units=units), loss
    if plan.batch.sync == "last":
        yield "plan.sync = 'every'", replace(plan, batch=replace(plan.batch, sync="every")), loss
    for kind in ("optimizer", "activations"):
        units = tuple(_to_host(u, kind) if kind == "optimizer" or u.name in blocks else u for u in plan.units)
        if units != plan.units:
            yield f"home.{kind} = 'host'", replace(plan, units=units), loss


def _to_host(unit: Unit, kind: str) -> Unit:
    if getattr(unit.home, kind) != "device":
        return unit
    return replace(
        unit, home=replace(unit.home, optimizer="host") if kind == "optimizer" else replace(unit.home, activations="host")
    )


def _halved(plan: Plan) -> Plan:
    b = plan.batch
    return replace(plan, batch=replace(b, micro_batch=b.micro_batch // 2, accumulate=2 * b.accumulate))


def advice(plan: Plan, description: Description, cluster: Cluster, *, loss: str = "chunked", clip: bool = True) -> str:
    """The first few remedies as the end of a sentence."""
    try:
        found = remedies(plan, description, cluster, loss=loss, clip=clip)
    except FullshardError:
        return "use remat, a smaller micro-batch or more devices"
    if not found:
        return "nothing small helps: use more devices, or a shorter sequence"
    return f"what would help, the cheapest first: {'; '.join(map(str, found[:4]))}"
