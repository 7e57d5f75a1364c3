"""The torch engine behind `fullshard.engine.bench_protocols.BenchEngine`: its functions are this module's."""

import os
import platform
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.engine.bench_protocols import CountedCollective, PeerRequest, refuse_peer
from fullshard.on_torch.loss.losses import LossFunction
from fullshard.on_torch.measuring.flops import flops_per_token
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.peers import other_libraries, torch_wrappers
from fullshard.on_torch.peers.peer import TorchPeer, counted, peak_bytes, reset_peak
from fullshard.on_torch.ranks.device_presets import known_device
from fullshard.on_torch.step.train_step import train_step

MAKERS: dict[str, Callable[[PeerRequest], TorchPeer]] = {
    "fully_shard": torch_wrappers.bare_fully_shard,
    "ddp": torch_wrappers.data_parallel,
    "fsdp1": torch_wrappers.fsdp1,
    "accelerate": other_libraries.accelerate,
    "deepspeed": other_libraries.deepspeed,
    "megatron-fsdp": other_libraries.megatron_fsdp,
}
PEERS: tuple[str, ...] = tuple(MAKERS)
PACKAGES = {"accelerate": "accelerate", "deepspeed": "deepspeed", "megatron-fsdp": "megatron_fsdp"}
NEEDS_GPU = ("megatron-fsdp",)  # its buffers are CUDA's


@dataclass
class StateContestant:
    """The steps of a state of fullshard."""

    state: State
    loss: LossFunction
    clip: float | None

    def step(self, micro_batches: Sequence[Any]) -> float:
        return train_step(self.state, micro_batches, loss=self.loss, clip=self.clip).numbers()[0]

    def collectives(self, micro_batches: Sequence[Any]) -> list[CountedCollective]:
        return counted(lambda: self.step(micro_batches))

    def reset_peak(self) -> None:
        self.state.flush()
        reset_peak(self.state.device)

    def memory(self) -> dict[str, int]:
        return peak_bytes(self.state.device)


make_contestant = StateContestant


def peer_fault(name: str) -> str | None:
    refuse_peer(name, "torch", PEERS)
    if name in PACKAGES and find_spec(PACKAGES[name]) is None:
        return f"{name} is not installed: pip install {name}"
    if name in NEEDS_GPU and not torch.cuda.is_available():
        return f"{name} needs a CUDA device, and this machine has none"
    return None


def make_peer(name: str, request: PeerRequest) -> TorchPeer:
    return MAKERS[name](request)


def flops(model: nn.Module, sequence: int) -> tuple[float, float | None]:
    known = known_device(torch.device("cuda")) if torch.cuda.is_available() else None
    return flops_per_token(model, sequence), known.peak.training if known else None


def limit_memory(nbytes: int | None) -> None:
    """On a GPU a limit of its allocator. On a CPU one of the kernel's, for what this process allocates from now on."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total) if nbytes is not None else 1.0)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard if nbytes is None else _data_bytes() + nbytes, hard))


def _data_bytes() -> int:
    """Private writable memory of this process, which RLIMIT_DATA limits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU ({os.cpu_count()} cores, {platform.machine()})"


if TYPE_CHECKING:  # mypy holds this module against the Protocol
    from fullshard.engine.bench_protocols import BenchEngine
    from fullshard.on_torch import bench_engine

    _: BenchEngine = bench_engine
