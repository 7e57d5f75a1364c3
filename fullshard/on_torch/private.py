"""All private torch APIs that the engine uses, so that a new torch version needs changes in one file only."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as _functional_collectives
from torch import _C, Tensor, _foreach_copy_, cuda, dtype, empty, nn, ones_like
from torch.autograd.graph import _engine_run_backward
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "WRAPPERS",
    "FSDPParamGroup",
    "GatherGroup",
    "MemoryHistory",
    "StorageWeakRef",
    "TorchDispatchMode",
    "addresses",
    "all_reduce",
    "all_to_all",
    "avoid_reduction_uploads",
    "can_replace_collectives",
    "clear_dtensor_cache",
    "default_store",
    "dtensor_like",
    "fake_ranks",
    "flight_records",
    "forget_unfinished",
    "gather_group",
    "group_label",
    "group_size",
    "inner",
    "persistent_buffers",
    "replace_collectives",
    "run_backward",
    "saved_tensor_hooks",
    "sharded_dim",
    "sole_owner",
    "without_function_modes",
]


def default_store() -> dist.Store:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def flight_records() -> list[dict[str, Any]]:
    """This rank's latest collectives from torch's flight recorder, oldest first; empty if it is off."""
    dump = getattr(_C._distributed_c10d, "_dump_fr_trace_json", None) or getattr(
        _C._distributed_c10d, "_dump_nccl_trace_json", None
    )
    try:
        return json.loads(dump(True, False)).get("entries", []) if dump else []
    except (RuntimeError, ValueError):
        return []


WRAPPERS = (DTensor, AsyncCollectiveTensor)  # tensor subclasses that wrap the tensor with the memory


def inner(tensor: Tensor) -> Tensor:
    """The plain tensor inside all wrappers."""
    while isinstance(tensor, WRAPPERS):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.elem
    return tensor


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Inside, this process is rank 0 of a fake group of `ranks` ranks, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_dtensor_cache()


def clear_dtensor_cache() -> None:
    """Clear DTensor's cache of sharding rules. Its entries hold process groups, and an equal mesh that is made later would
    get the groups of the earlier one."""
    from torch.distributed.tensor import debug  # imported here: it imports torch's compiler, which takes a second

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def forget_unfinished(modules: Iterable[FSDPModule], *_: object) -> None:
    """Let the next forward of a unit of several modules gather it, though one of them did not run in the last: torch 2.11
    waits for that one, such as T5's `shared`, whose weight other modules have. `modules`: one of each unit."""
    for module in modules:
        running = getattr(module._get_fsdp_state(), "_modules_to_run_forward", None)
        if running is not None:
            running.clear()


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dim that a placement shards, or None. FSDP over a tensor axis uses strided shards, which are not `Shard`
    in newer torch."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def all_reduce(tensor: Tensor, op: str, mesh: Any) -> Tensor:
    """The sum or maximum over the ranks of a mesh of one dim, without gradients."""
    return _functional_collectives.wait_tensor(_functional_collectives.all_reduce(tensor, op, mesh.get_group()))


def all_to_all(tensor: Tensor, mesh: Any, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
    """Rows of `tensor` sent to the ranks of a mesh of one dim, with gradients: `sent` rows to each, `received` rows from each;
    by default as many to and from all."""
    exchanged = _functional_collectives.all_to_all_single_autograd(tensor.contiguous(), received, sent, mesh.get_group())
    return _functional_collectives.wait_tensor(exchanged)


def group_size(name: object) -> int:
    """The number of ranks in the process group of a functional collective."""
    return _resolve_process_group(name).size()  # type: ignore[arg-type]


def run_backward(value: Tensor) -> None:
    """`value.backward()` with torch function modes active. The public API disables them during backward."""
    _engine_run_backward((value,), (ones_like(value),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def without_function_modes() -> Any:
    """A context in which torch function modes see no call. They see even `tensor.shape`, which is slow."""
    return _C.DisableTorchFunction()


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The innermost pair of saved-tensor hooks: pack and unpack."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


def _owners(tensor: Tensor) -> int:
    return _C._storage_Use_Count(tensor.untyped_storage()._cdata)


def sole_owner(tensor: Tensor) -> bool:
    """True if no other tensor shares this one's storage. Autograd accumulates in place only then."""
    return _owners(tensor) == _owners(empty(1, device=tensor.device))


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """The data pointers of this rank's parts. Avoids `to_local`, which takes ten times as long."""
    return [(t._local_tensor if isinstance(t, DTensor) else t).data_ptr() for t in tensors]


def dtensor_like(like: DTensor, part: Tensor) -> DTensor:
    """A DTensor sharded like `like`, with `part` as this rank's shard. `DTensor.from_local` would move `part` to the mesh's
    device."""
    assert like._spec.tensor_meta is not None
    meta = like._spec.tensor_meta._replace(dtype=part.dtype)
    return DTensor(part, dataclasses.replace(like._spec, tensor_meta=meta), requires_grad=False)


def persistent_buffers(model: nn.Module) -> set[str]:
    """The names of the buffers that are part of the state dict."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


class GatherGroup:
    """FSDP's parameter group of one unit, with the operations that offloading needs."""

    def __init__(self, group: Any):
        self.group = group

    def reduce_into(self, kind: dtype) -> None:
        """Keep gradients in this dtype after the reduction, instead of casting them to the shards' dtype. FSDP resets this
        when it initialises lazily, so it must be called before every gather."""
        self.group._orig_dtype = kind

    def around_gather(self, before: Callable[[], None], at_copy: Callable[[], None], after: Callable[[], None]) -> None:
        """Call `before` before a gather is issued, `at_copy` before the gathered parameters are copied out, and `after` when
        that copy is queued. In a group of one rank, FSDP reads the shard at the time of the copy-out."""
        group, unshard, wait = self.group, self.group.unshard, self.group.wait_for_unshard

        def issue(async_op: bool = False) -> None:
            if group.is_sharded and group._all_gather_result is None:
                before()
            unshard(async_op)

        def copy_out() -> None:
            if group._all_gather_result is None:
                return wait()
            at_copy()
            wait()
            after()

        group.unshard, group.wait_for_unshard = issue, copy_out

    def adopt(self) -> None:
        """Register the modules' current parameters as FSDP's shards, permanently. FSDP would do so at its first run and after
        `load_state_dict`, when the storage of offloaded shards is already freed."""
        for p in self.group.fsdp_params:
            p.reset_sharded_param()
            p._init_extensions()
            p.reset_sharded_param = _do_nothing
        self.group._reset_sharded_params = True

    def hold_gathers(self, event: Any) -> None:
        """Make all later gathers wait for `event` before they read the shards."""
        self.group._wait_all_gather_streams_on_event(event)

    def padded(self) -> list[tuple[Any, int]]:
        """(parameter, number of elements of its padded shard) for each parameter."""
        return [(p.sharded_param, p.padded_sharded_param_size.numel()) for p in self.group.fsdp_params]

    def buffers(self) -> list[tuple[Any, Tensor]]:
        """(parameter, its flat padded shard) for each parameter."""
        return [(p.sharded_param, p._sharded_param_data) for p in self.group.fsdp_params]


def _do_nothing() -> None:
    pass


def gather_group(module: FSDPModule) -> GatherGroup | None:
    """The module's parameter group; None if it has no parameters of its own."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and newer; fullshard makes one per module
    if groups is not None:
        return GatherGroup(groups[0]) if groups else None
    return GatherGroup(state._fsdp_param_group) if state._fsdp_param_group else None


def group_label(module: FSDPModule) -> str | None:
    """The name of the module's parameter group in traces; None if it has no parameters of its own."""
    group = gather_group(module)
    return None if group is None else str(group.group._module_fqn or "")


class MemoryHistory:
    """Records every allocation on the GPU, for torch's memory visualiser (pytorch.org/memory_viz)."""

    def __init__(self) -> None:
        self.record = getattr(cuda.memory, "_record_memory_history", None)
        if self.record:  # of Python alone: frames of C++ cost more time than the step, and most of the file
            self.record(max_entries=200_000, stacks="python")

    def write(self, path: Path) -> None:
        """Stop, and write the history."""
        if self.record:
            cuda.memory._dump_snapshot(str(path))
            self.record(enabled=None)


GatherFunction = Callable[[Tensor, Tensor, dist.ProcessGroup], None]  # output, shard, group
ReduceFunction = Callable[[Tensor, Tensor, dist.ProcessGroup], None]  # output, gradients, group


def can_replace_collectives() -> bool:
    """True if this torch lets FSDP's collectives be replaced."""
    kinds = all(hasattr(_fsdp_api, name) for name in ("AllGather", "ReduceScatter"))
    return kinds and all(hasattr(FSDPModule, f"set_custom_{name}") for name in ("all_gather", "reduce_scatter"))


def replace_collectives(module: FSDPModule, gather: GatherFunction | None, reduce: ReduceFunction | None) -> None:
    """Let FSDP call these functions for the module's own parameters; None leaves its own collective. `reduce` sums; FSDP's
    average is taken from the sum."""
    if gather is not None:
        module.set_custom_all_gather(_make_gather(gather))
    if reduce is not None:
        module.set_custom_reduce_scatter(_make_reduce(reduce))


def _allocate(self: Any, size: Any, *, dtype: dtype, device: Any) -> Tensor:
    return empty(*size, dtype=dtype, device=device)


def _make_gather(function: GatherFunction) -> Any:
    def call(self: Any, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        function(output_tensor, input_tensor, group)  # FSDP takes None for a collective that is on the stream already

    return type("Gather", (_fsdp_api.AllGather,), {"allocate": _allocate, "__call__": call})()


def _make_reduce(function: ReduceFunction) -> Any:
    def call(
        self: Any, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        function(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())

    return type("Reduce", (_fsdp_api.ReduceScatter,), {"allocate": _allocate, "__call__": call})()


@cache
def avoid_reduction_uploads() -> None:
    """Replace FSDP's copy-in before reduce-scatter by plain copies.

    FSDP's own kernel uploads a table of addresses on the compute stream each time. While an offloaded optimizer fills
    PCIe, backward would wait for that upload at every unit. Plain copies upload nothing.
    """
    _fsdp_collectives.foreach_reduce_scatter_copy_in = partial(_copy_in, _fsdp_collectives.foreach_reduce_scatter_copy_in)


def _copy_in(original: Callable[..., None], gradients: list[Tensor], flat: Tensor, ranks: int) -> None:
    if not flat.is_cuda or any(g.ndim == 0 or g.size(0) % ranks for g in gradients):
        return original(gradients, flat, ranks)
    parts = flat.view(ranks, -1).split([g.numel() // ranks for g in gradients], dim=1)
    _foreach_copy_(list(parts), [g.reshape(ranks, -1) for g in gradients])
