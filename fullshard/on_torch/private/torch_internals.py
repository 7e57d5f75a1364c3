"""All private torch APIs that the engine uses but those of FSDP (`fsdp_groups`), so that a new torch needs changes here only."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as _functional_collectives
from torch import _C, Tensor, cuda, device, dtype, empty, nn, ones_like
from torch.autograd.graph import _engine_run_backward
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from fullshard.base.errors import FullshardError

__all__ = [
    "WRAPPERS",
    "MemoryHistory",
    "StorageWeakRef",
    "TorchDispatchMode",
    "adam_lists",
    "addresses",
    "all_reduce",
    "all_to_all",
    "clear_dtensor_cache",
    "default_store",
    "dtensor_like",
    "fake_ranks",
    "flight_records",
    "group_size",
    "hide_values",
    "inner",
    "options_without_saved",
    "persistent_buffers",
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


class _Unreadable(Tensor):
    """A tensor without memory, on any device. It has views; an operation that needs its values raises `sentence`."""

    __torch_function__ = _C._disabled_torch_function_impl  # type: ignore[assignment]
    shape_only: Tensor  # the same on meta
    sentence: str

    @staticmethod
    def make(shape_only: Tensor, where: device, sentence: str) -> "_Unreadable":
        t = shape_only
        found = Tensor._make_wrapper_subclass(
            _Unreadable, t.size(), t.stride(), t.storage_offset(), dtype=t.dtype, device=where, storage_size=0
        )
        found.shape_only, found.sentence = t, sentence
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, name, named = next(iter(args), None), func.overloadpacket.__name__, kwargs or {}
        if isinstance(first, _Unreadable) and func.is_view:
            shapes = tree_map_only(_Unreadable, lambda t: t.shape_only, args)  # all of them: `view_as` takes two
            found = func(*shapes, **named)
            views = [cls.make(t, first.device, first.sentence) for t in (found if isinstance(found, list) else [found])]
            return views if isinstance(found, list) else views[0]
        if isinstance(first, _Unreadable) and name.startswith(("empty_like", "zeros_like", "ones_like", "new_")):
            return func(first.shape_only, *args[1:], **{**named, "device": named.get("device") or first.device})
        if name == "copy_" and first is args[1]:  # `load_state_dict` copies a parameter to itself
            return first
        raise FullshardError(next(t.sentence for t in tree_leaves((args, named)) if isinstance(t, _Unreadable)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FullshardError(self.sentence)


def hide_values(parameter: Any, sentence: str) -> None:
    """Raise a FullshardError with this sentence if values of a parameter's shard, whose memory is freed, are read: torch would
    read from address zero. FSDP has its own reference to the shard."""
    shard = parameter._local_tensor
    parameter._local_tensor = _Unreadable.make(shard.to("meta"), shard.device, sentence)


def dtensor_like(like: DTensor, part: Tensor) -> DTensor:
    """A DTensor sharded like `like`, with `part` as this rank's shard. `DTensor.from_local` would move `part` to the mesh's
    device."""
    assert like._spec.tensor_meta is not None
    meta = like._spec.tensor_meta._replace(dtype=part.dtype)
    return DTensor(part, dataclasses.replace(like._spec, tensor_meta=meta), requires_grad=False)


def adam_lists(optimizer: Any, group: dict[str, Any]) -> tuple[list[Tensor], ...]:
    """The parameters of a group of torch's Adam that have gradients, their gradients, both moments and steps. Makes the state
    of those that have none."""
    parameters, gradients, first, second, largest, steps = ([], [], [], [], [], [])  # type: ignore[var-annotated]
    optimizer._init_group(group, parameters, gradients, first, second, largest, steps)
    return parameters, gradients, first, second, steps


def persistent_buffers(model: nn.Module) -> set[str]:
    """The names of the buffers that are part of the state dict."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


@cache
def options_without_saved(kind: dtype) -> dict[str, Any]:
    """Options of `torch.compile` with which nothing that depends on inputs of this dtype alone is kept for backward. There it is
    computed again, from inputs that FSDP gathers anew. The same object for every call: dynamo compiles a module's code again
    for other options, and gives up after eight times."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Recompute(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            alone = set()
            for node in graph.nodes:
                if node.op == "placeholder" and getattr(node.meta.get("val"), "dtype", None) is kind:
                    alone.add(node)
                elif node.op == "call_function" and node.all_input_nodes and alone.issuperset(node.all_input_nodes):
                    alone.add(node)
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,), str(kind))

    return {"joint_custom_post_pass": Recompute()}


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
