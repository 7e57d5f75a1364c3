"""One model on one cluster under each strategy: bytes by term, bytes on the wire, seconds. Nothing runs.

Every column has the same batch, precision, remat and compile choice, so only the strategy differs.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.plan.plan import Batch, Home, Plan, Precision, Remat, Sync
from fullshard.planner.estimate import Estimate, cores_share, estimate
from fullshard.planner.memory.peak_memory import most_by_term
from fullshard.planner.search.plan_space import engine_for
from fullshard.planner.step.effects import Term
from fullshard.planner.strategies import choose
from fullshard.planner.wire_bytes import WireBytes, wire_bytes

# The terms of memory as a comparison shows them.
GROUPS: dict[Term, str] = {
    "params": "params",
    "gradients": "gradients",
    "whole gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered",
    "fetched": "gathered",
    "activations": "activations",
    "loss": "other",
    "reduce": "other",
    "workspace": "other",
    "batch": "other",
    "staging": "other",
    "buffers": "other",
}
# A prediction looks at every chunk of the loss and at every micro-batch's tokens: larger batches would take minutes.
MOST_TOKENS, MOST_ACCUMULATED = 1 << 24, 1 << 13
OFFLOADED = {
    "offload": ("zero3, optimizer state in host memory", Home(optimizer="host")),
    "offload all": ("zero3, parameters and optimizer state in host memory", Home("host", "host")),
}


@dataclass(frozen=True)
class ComparedPlan:
    """A strategy and what it costs. `most`: the most bytes of each term during a step, which do not all occur at once."""

    name: str
    words: str
    plan: Plan
    estimate: Estimate
    most: dict[str, int]
    wire: WireBytes

    def to_dict(self) -> dict[str, Any]:
        e = self.estimate
        return {
            "name": self.name,
            "what": self.words,
            "mesh": asdict(self.plan.mesh),
            "bytes": self.most,
            "peak_bytes": e.device.allocated_bytes,
            "needed_bytes": e.needed,
            "available_bytes": e.available,
            "host_bytes": e.host.allocated_bytes,
            "host_available_bytes": e.host_available,
            "fits": e.fits,
            "wire_bytes": asdict(self.wire) | {"total": self.wire.total},
            "step_seconds": e.step_seconds,
            "tokens_per_second": e.tokens_per_second,
            "mfu": e.mfu,
            "bottleneck": e.bottleneck,
        }


@dataclass(frozen=True)
class Comparison:
    """A model under several strategies on one cluster. The first is `ddp`, which the others are compared with."""

    description: Description
    cluster: Cluster
    batch: Batch
    precision: Precision
    remat: Remat
    compile: bool
    engine: str
    plans: tuple[ComparedPlan, ...]

    @property
    def fastest(self) -> ComparedPlan | None:
        """The fastest that fits; None if none does."""
        return min((p for p in self.plans if p.estimate.fits), key=lambda p: p.estimate.step_seconds, default=None)

    def saving(self, other: ComparedPlan) -> float:
        """The share of the memory of `ddp` that a plan does not need on the device."""
        return 1 - other.estimate.needed / self.plans[0].estimate.needed

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.description.model,
            "parameters": self.description.numel,
            "cluster": self.cluster.name,
            "batch": asdict(self.batch),
            "precision": asdict(self.precision),
            "remat": self.remat,
            "compile": self.compile,
            "engine": self.engine,
            "calibrated_for_device": self.plans[0].estimate.calibrated_for_device,
            "plans": [p.to_dict() | {"saving": self.saving(p)} for p in self.plans],
            "fastest": self.fastest.name if self.fastest else None,
        }


def compare(
    description: Description,
    cluster: Cluster,
    batch: Batch,
    *,
    precision: Precision | None = None,
    remat: Remat = "none",
    compile: bool | None = None,
    replicate: int | None = None,
    limit: int | None = None,
    clip: bool = True,
) -> Comparison:
    """Compare the strategies for `description` on `cluster`.

    `batch`: of each rank, as `cut_batch` makes it. `compile`: by default on GPUs, for models with repeated blocks.
    `replicate`: copies of `hybrid`, by default one for each node. `limit`: bytes of a device to use.
    """
    on_cpu, blocks = cluster.device.kind == "cpu", any(u.kind == "block" for u in description.units)
    chosen = precision or Precision(compute=cluster.device.peak.fastest)
    compiled = (blocks and not on_cpu) if compile is None else compile
    engine = engine_for(cluster, None)
    made = []
    for name, words, strategy, own in _strategies(cluster, hybrid_copies(cluster, replicate)):
        its = replace(batch, sync="every") if strategy == "zero1" else batch  # it reduces after the last anyway
        common: dict[str, Any] = {"batch": its, "precision": chosen, "remat": remat, "compile": compiled}
        plan = choose(strategy, description, devices=cluster.devices, **own, **common)
        made.append(_compared(name, words, plan, description, cluster, limit, clip, engine))
    return Comparison(description, cluster, batch, chosen, remat, compiled, engine, tuple(made))


def cut_batch(
    cluster: Cluster, *, sequence: int = 1024, global_batch: int | None = None, micro_batch: int = 1, sync: Sync = "every"
) -> Batch:
    """The batch of each rank. `global_batch`: sequences in a step, by default a micro-batch for each device.

    `sync`: when gradients are reduced; `zero1` always reduces after the last micro-batch.
    """
    if micro_batch < 1:
        raise FullshardError(f"the micro-batch must be at least 1, not {micro_batch}")
    at_once = cluster.devices * micro_batch
    wanted = at_once if global_batch is None else global_batch
    if wanted < 1 or wanted % at_once:
        raise FullshardError(
            f"a global batch of {wanted} cannot be cut into micro-batches of {micro_batch} for {cluster.devices} ranks; "
            f"give a multiple of {at_once}"
        )
    if micro_batch * sequence > MOST_TOKENS:
        raise FullshardError(f"a micro-batch of {micro_batch} × {sequence} tokens is too large to predict; give fewer")
    if wanted // at_once > MOST_ACCUMULATED:
        raise FullshardError(f"{wanted // at_once} micro-batches in a step are too many to predict; give a smaller global batch")
    return Batch(micro_batch, sequence, wanted // at_once, sync)


def hybrid_copies(cluster: Cluster, replicate: int | None) -> int:
    """Copies of the model that `hybrid` keeps: those asked for, else one for each node; 1 if there is no hybrid to show."""
    if replicate is None:
        return cluster.nodes if cluster.devices % cluster.nodes == 0 else 1
    if replicate < 2 or cluster.devices % replicate:
        raise FullshardError(
            f"hybrid cannot keep {replicate} copies on {cluster.devices} devices; give a divisor of {cluster.devices} above 1"
        )
    return replicate


def _strategies(cluster: Cluster, copies: int) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Name, words, strategy and its own arguments of each column."""
    for name in ("ddp", "zero1", "zero2", "zero3"):
        yield name, name, name, {}
    if copies > 1:
        words = f"{copies} copies, each sharded over {cluster.devices // copies} devices"
        yield "hybrid", words, "hybrid", {"replicate": copies}
    for name, (words, home) in OFFLOADED.items() if cluster.device.kind != "cpu" else ():
        yield name, words, "zero3", {"home": home}


def _compared(
    name: str, words: str, plan: Plan, description: Description, cluster: Cluster, limit: int | None, clip: bool, engine: str
) -> ComparedPlan:
    found = estimate(plan, description, cluster, limit=limit, clip=clip, engine=engine)
    share, on_cuda = cores_share(plan, cluster), cluster.device.kind == "cuda"
    most = most_by_term(plan, description, GROUPS, clip=clip, cpu_share=share, engine=engine, cublas=on_cuda)
    return ComparedPlan(name, words, plan, found, most, wire_bytes(plan, description, clip=clip, engine=engine))
