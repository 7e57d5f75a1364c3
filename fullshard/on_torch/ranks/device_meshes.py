"""Ranks and device meshes: joining the process group, and mapping a plan's mesh onto the ranks."""

import os
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.base.errors import FullshardError
from fullshard.on_torch.ranks.rendezvous import join
from fullshard.plan.plan import Layout, Mesh, Plan
from fullshard.ranks.local_ranks import ranks_here
from fullshard.ranks.slurm import adopt_slurm


def start(device: str | None = None) -> torch.device:
    """Join the ranks that torchrun or srun started, or start alone. Returns this rank's device.

    Idempotent. On GPUs, collectives on CUDA tensors use NCCL and those on CPU tensors gloo.
    """
    adopt_slurm()
    # CUDA streams share this many hardware queues, by default 8. The engine has more streams than that, and a copy that
    # shares a queue with compute would wait for it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's flight recorder, for hang reports
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    local = int(os.environ.get("LOCAL_RANK", 0))
    if kind == "cuda":
        torch.cuda.set_device(local % torch.cuda.device_count())
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if "RANK" in os.environ:
            join(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


@dataclass(frozen=True)
class Meshes:
    """The device meshes of one plan. Units with layout `replicated` have a mesh of their own: they are hybrid-sharded over
    groups of one rank, so that FSDP handles every layout."""

    shape: Mesh
    sharded: DeviceMesh
    replicated: DeviceMesh | None
    experts: DeviceMesh | None = None  # the same ranks, with the shard axis cut into `shard` and `expert`

    def data(self, layout: Layout) -> DeviceMesh:
        """The mesh over which FSDP replicates and shards a unit of this layout."""
        root = self._root(layout)
        names = tuple(n for n in root.mesh_dim_names or () if n not in ("tensor", "expert"))
        return root if len(names) == root.ndim else root[names]

    def tensor(self, layout: Layout) -> DeviceMesh:
        """The tensor axis of a unit of this layout."""
        return self._root(layout)["tensor"]

    def expert(self) -> DeviceMesh:
        """The expert axis."""
        return self._root("experts")["expert"]

    def _root(self, layout: Layout) -> DeviceMesh:
        if layout == "experts" and self.experts is not None:
            return self.experts
        return self.replicated if layout == "replicated" and self.replicated is not None else self.sharded


def make_meshes(plan: Plan, kind: str) -> Meshes:
    """Make the device meshes of a plan. Raises if it is for another number of ranks. Collective."""
    world = dist.get_world_size()
    if plan.mesh.devices != world:
        raise FullshardError(
            f"the plan is for {plan.mesh.devices} devices ({plan.mesh}), but {world} ranks are running; "
            f"start {plan.mesh.devices} ranks or make the plan for {world}"
        )
    layouts = {u.layout for u in plan.units}
    replicated = None
    if "replicated" in layouts and plan.mesh.shard > 1:
        replicated = _mesh(kind, Mesh(plan.mesh.data, 1, plan.mesh.tensor))
    experts = _mesh(kind, plan.mesh, experts=True) if "experts" in layouts else None
    return Meshes(plan.mesh, _mesh(kind, plan.mesh), replicated, experts)


def _mesh(kind: str, mesh: Mesh, experts: bool = False) -> DeviceMesh:
    axes = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    if experts:
        axes |= {"shard": mesh.shard // mesh.expert, "expert": mesh.expert}
    kept = {n: size for n, size in axes.items() if size > 1 or n == "shard"}
    return _device_mesh(dist.group.WORLD, kind, tuple(kept), tuple(kept.values()))


@cache
def _device_mesh(world: dist.ProcessGroup, kind: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """The mesh of these axes over all ranks, made once: its process groups take threads, or memory on the GPU, and last as long
    as the process."""
    return init_device_mesh(kind, sizes, mesh_dim_names=names)


def local_devices() -> int:
    """The default number of ranks on this machine: its number of GPUs, or 2 without GPUs."""
    return torch.cuda.device_count() or 2


def all_devices() -> int:
    """The number of ranks that the launcher starts: each has one device."""
    return int(os.environ.get("WORLD_SIZE", 1))


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int:
    """The number of ranks on this machine; all of them if no launcher says."""
    return ranks_here(world_size())


def rank_and_world() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def is_first() -> bool:
    """True on rank 0, which writes files and prints."""
    return dist.get_rank() == 0


def finish() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def data_rank(mesh: Mesh) -> int:
    """The index of this rank's batch among `mesh.data` batches. The ranks of a tensor group share one."""
    return dist.get_rank() // mesh.tensor


def data_share(mesh: Mesh) -> tuple[int, int]:
    """This rank's share of a step's rows, and of how many."""
    return data_rank(mesh), mesh.data


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks, in place."""
    dist.all_reduce(tensor)
    return tensor
