"""An outside count of memory: the real engine on CPU tensors, every storage followed from birth to death.

The engine runs as rank 0 of N over torch's fake process group; kernels that only CUDA has are stood in for
by tensors of the right sizes. Nothing of the planner is used here.
"""

import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.optimizers import one_pass_adam, sharded_optimizer
from fullshard.on_torch.private.torch_internals import WRAPPERS, clear_dtensor_cache, sole_owner
from fullshard.on_torch.tensors.batch_tree import leaves
from fullshard.on_torch.tracing.cuda_kernels import FusedKernels

aten = torch.ops.aten
ONLY_CUDA = {
    *(aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_cudnn_attention_backward.default),
    *(aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_efficient_attention_backward.default),
}


class Live(TorchDispatchMode):
    """Bytes of all storages alive, and the most there ever were."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.refs: dict[int, weakref.ref] = {}
        self.now = self.peak = 0
        self.changes: list[int] = []

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.refs:
            self.refs[key] = weakref.ref(storage, lambda ref, key=key: self._gone(ref, key))
            self.set(key, storage.nbytes())

    def set(self, key: int, nbytes: int) -> None:
        change = nbytes - self.sizes.get(key, 0)
        self.sizes[key] = nbytes
        self.now += change
        self.peak = max(self.peak, self.now)
        if change:
            self.changes.append(change)

    def _gone(self, ref, key: int) -> None:
        if self.refs.get(key) is ref:
            self.set(key, 0)
            del self.refs[key], self.sizes[key]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, WRAPPERS) for t in types):
            return NotImplemented
        if func is aten.add.Tensor and _autograd_adds(args):
            func = aten.add_.Tensor  # as autograd does when no mode is watching
        if func in (aten.mm.dtype_out, aten.addmm.dtype_out):
            return kwargs["out"]
        if func in ONLY_CUDA:
            out = tree_map(_real, func(*tree_map(_meta, args), **tree_map(_meta, kwargs or {})))
        else:
            out = func(*args, **(kwargs or {}))
        for t in tree_leaves(args[0] if out is None else out):  # without a result, a list is written
            if isinstance(t, torch.Tensor) and not isinstance(t, WRAPPERS) and t.device.type == "cpu":
                self.see(t)
        return out


def _autograd_adds(args) -> bool:
    a, b = args[:2]
    if torch.is_grad_enabled() or not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype or a.ndim < 2:
        return False
    return a.untyped_storage().nbytes() == a.nbytes and sole_owner(a)


def _meta(leaf):
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _real(leaf):
    return torch.zeros_like(leaf, device="cpu") if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def _resizes_seen(live: Live):
    """FSDP frees gathered parameters by resizing their storage, which no operator tells of."""
    resize = torch.UntypedStorage.resize_

    def told(storage, size):
        resize(storage, size)
        if storage._cdata in live.refs:
            live.set(storage._cdata, size)

    torch.UntypedStorage.resize_ = told
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


@contextmanager
def ranks(world: int):
    """This process as rank 0 of `world`."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_dtensor_cache()


@contextmanager
def _one_pass():
    """Inside, optimizers update as on a GPU."""
    fits, update = sharded_optimizer._fits_one_pass, one_pass_adam._update_by_torch
    sharded_optimizer._fits_one_pass = lambda *_: True
    one_pass_adam._update_by_torch = lambda *_: None  # the GPU's kernel allocates nothing
    try:
        yield
    finally:
        sharded_optimizer._fits_one_pass, one_pass_adam._update_by_torch = fits, update


@dataclass(frozen=True)
class Step:
    """A steady step: the most bytes alive, every change in order, and the collectives."""

    peak: int
    changes: list[int]
    collectives: list[tuple[str, int, int]]


def run_step(model, plan: fs.Plan, loss, vocabulary: int, batches=None) -> Step:
    with ranks(plan.mesh.devices), _one_pass():
        state = on_torch.shard(model, plan, fs.AdamW(lr=1e-5), device="cpu", first_step_checks=False)
        if batches is None:
            ids = torch.randint(0, vocabulary, (plan.batch.accumulate, plan.batch.micro_batch, plan.batch.sequence + 1))
            batches = [{"input_ids": i[:, :-1].clone(), "labels": i[:, 1:].clone()} for i in ids]
        with on_torch.record() as traffic:
            for _ in range(2):
                traffic.collectives.clear()
                on_torch.train_step(state, batches, loss=loss, clip=1.0)
        watched = Live()
        for t in _at_rest(state, batches):
            watched.see(t)
        with _resizes_seen(watched), FusedKernels(), watched:
            on_torch.train_step(state, batches, loss=loss, clip=1.0)
        return Step(watched.peak, watched.changes, [(c.kind, c.nbytes, c.ranks) for c in traffic.collectives])


def _at_rest(state, batches):
    yield from (t for batch in batches for _, t in leaves(batch))
    slots = [t for slot in state.optimizer.state.values() for t in slot.values()]
    for t in [*state.model.parameters(), *state.model.buffers(), *slots]:
        yield getattr(t, "_local_tensor", t)
