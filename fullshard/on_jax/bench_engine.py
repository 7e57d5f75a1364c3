"""The JAX engine behind `fullshard.engine.bench_protocols.BenchEngine`: its functions are this module's."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from fullshard.engine.bench_protocols import CountedCollective, PeerRequest, refuse_peer
from fullshard.on_jax.communication.hlo_collectives import collectives_of
from fullshard.on_jax.loss.losses import LossFunction
from fullshard.on_jax.measuring.flops import flops_per_token
from fullshard.on_jax.model.describe import Factory
from fullshard.on_jax.model.loading.model_loading import built
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.peers.plain_step import PlainStep, plain_step
from fullshard.on_jax.ranks.jax_devices import known_device, peak_bytes
from fullshard.on_jax.step.train_step import lowered_step, train_step
from fullshard.plan.plan import Mesh

PEERS: tuple[str, ...] = ("plain",)
KINDS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all_reduce", "other": "all_to_all"}


@dataclass
class JaxStateContestant:
    """The steps of a state of fullshard."""

    state: JaxState
    loss: LossFunction
    clip: float | None

    def step(self, micro_batches: Sequence[Any]) -> float:
        return train_step(self.state, micro_batches, loss=self.loss, clip=self.clip).numbers()[0]

    def collectives(self, micro_batches: Sequence[Any]) -> list[CountedCollective]:
        text = lowered_step(self.state, micro_batches, loss=self.loss).compile().as_text()
        return _counted(text, self.state.plan.mesh)

    def reset_peak(self) -> None:
        """Nothing: a step ends with its updates, and JAX counts the peak since the process began."""

    def memory(self) -> dict[str, int]:
        return peak_bytes(jax.local_devices()[0])


@dataclass
class JaxPeer:
    """The plain step."""

    plain: PlainStep

    def step(self, micro_batches: Sequence[Any]) -> float:
        return self.plain.step(micro_batches)

    def collectives(self, micro_batches: Sequence[Any]) -> list[CountedCollective]:
        return _counted(self.plain.text(micro_batches), Mesh(replicate=self.plain.mesh.size))

    def reset_peak(self) -> None:
        """Nothing, as above."""

    def memory(self) -> dict[str, int]:
        return peak_bytes(jax.local_devices()[0])


def _counted(text: str, mesh: Mesh) -> list[CountedCollective]:
    """The collectives of a compiled program, as its text has them."""
    sizes = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    found = []
    for c in collectives_of(text, mesh):
        ranks = 1
        for axis in c.axes:
            ranks *= sizes[axis]
        if ranks > 1:
            found.append(CountedCollective(KINDS[c.kind], c.nbytes, ranks, c.times))
    return found


make_contestant = JaxStateContestant


def peer_fault(name: str) -> str | None:
    refuse_peer(name, "jax", PEERS)
    return None


def make_peer(name: str, request: PeerRequest) -> JaxPeer:
    return JaxPeer(plain_step(request))


def flops(model: Factory, sequence: int) -> tuple[float, float | None]:
    known = known_device(jax.local_devices()[0])
    return flops_per_token(built(model), sequence), known.peak.training if known else None


limit_memory = None  # JAX reserves a device's memory when it starts


def hardware() -> str:
    kind = jax.local_devices()[0].device_kind
    return f"CPU ({os.cpu_count()} cores, {platform.machine()})" if kind == "cpu" else kind


if TYPE_CHECKING:  # mypy holds this module against the Protocol
    from fullshard.engine.bench_protocols import BenchEngine
    from fullshard.on_jax import bench_engine

    _: BenchEngine = bench_engine
