"""Processes and meshes: who is running, and how a plan's axes lie over them."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.errors import FullshardError
from fullshard.on_torch.rendezvous import own_store, shares_a_store
from fullshard.plan import Layout, Mesh, Plan
from fullshard.slurm import adopt_slurm


def start(device: str | None = None) -> torch.device:
    """Join the ranks that torchrun or srun started, or be the only one; the device this rank works on.

    Idempotent. On GPUs, collectives on CPU tensors go over gloo beside NCCL.
    """
    adopt_slurm()
    # Streams share this many queues of the device, 8 if nobody says: gathers, reductions, copies both ways and updates are
    # more, and a copy that shares its queue with compute waits for all of it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's flight recorder: which collective a hung rank is in
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    local = int(os.environ.get("LOCAL_RANK", 0))
    if kind == "cuda":
        torch.cuda.set_device(local % torch.cuda.device_count())
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if shares_a_store():
            dist.init_process_group(
                backend, store=own_store(), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )
        elif "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


@dataclass(frozen=True)
class Meshes:
    """The device meshes of one plan. Units of different layouts see the same ranks differently: a
    replicated unit is hybrid-sharded over groups of one, so that one mechanism serves every layout."""

    shape: Mesh
    sharded: DeviceMesh
    replicated: DeviceMesh | None

    def data(self, layout: Layout) -> DeviceMesh:
        """The axes over which a unit of this layout is replicated and sharded."""
        root = self._root(layout)
        names = tuple(n for n in root.mesh_dim_names or () if n != "tensor")
        return root if len(names) == root.ndim else root[names]

    def tensor(self, layout: Layout) -> DeviceMesh:
        return self._root(layout)["tensor"]

    def _root(self, layout: Layout) -> DeviceMesh:
        return self.replicated if layout == "replicated" and self.replicated is not None else self.sharded


def make_meshes(plan: Plan, kind: str) -> Meshes:
    """Collective: every rank must call it."""
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
    return Meshes(plan.mesh, _mesh(kind, plan.mesh), replicated)


def _mesh(kind: str, mesh: Mesh) -> DeviceMesh:
    axes = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    kept = {n: size for n, size in axes.items() if size > 1 or n == "shard"}
    return init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))


def local_devices() -> int:
    """How many ranks this machine is good for: its GPUs, or two on a CPU."""
    return torch.cuda.device_count() or 2


def ranks_here() -> int:
    """How many ranks share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def rank_and_world() -> tuple[int, int]:
    """Which rank this is, of how many."""
    return dist.get_rank(), dist.get_world_size()


def is_first() -> bool:
    """Whether this rank is the one that writes and speaks."""
    return dist.get_rank() == 0


def finish() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def data_rank(mesh: Mesh) -> int:
    """Which of the `mesh.data` batches this rank works on; the ranks of a tensor group share one."""
    return dist.get_rank() // mesh.tensor


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in place."""
    dist.all_reduce(tensor)
    return tensor
