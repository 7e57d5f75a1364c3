"""Rematerialisation: recompute a unit's activations in backward instead of keeping them.

Replaces a module's `forward` instead of wrapping the module. So names in state dicts stay the same, and FSDP's hooks do
not run again in the recomputation.
"""

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fullshard.on_torch.model.changing_buffers import Watch, borrowed_buffers, buffers_of
from fullshard.on_torch.parallelize.attention_backend import call_block, has_backend
from fullshard.on_torch.private.torch_internals import TorchDispatchMode
from fullshard.plan.plan import Remat

# What `selective` keeps: the results of matrix products and attention. Everything else is cheap to recompute.
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,  # in float8
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


CONTEXTS = "_fullshard_contexts"  # an attribute of a module: what its recomputation runs in. Dynamo reads no weak registry.


def apply_remat(module: nn.Module, remat: Remat) -> None:
    """Make `module` keep for backward only its inputs (`full`), or these and its matrix products (`selective`)."""
    if remat != "none" or has_backend(module):
        forward = {"none": call_block, "full": _forward_full, "selective": _forward_selective}[remat]
        # A bound method of one shared function: dynamo compiles it once, but a closure per block each time.
        module.forward = types.MethodType(forward, module)


@contextmanager
def under_remat(modules: Iterable[nn.Module], remat: Remat, contexts: Callable[[], Any] | None = None) -> Iterator[None]:
    """Inside, the modules are under `remat`, whatever they were before. `contexts`: what each recomputation runs in."""
    before = [(m, {key: vars(m)[key] for key in ("forward", CONTEXTS) if key in vars(m)}) for m in modules]
    for module, _ in before:
        apply_remat(module, remat)
        if contexts is not None:
            vars(module)[CONTEXTS] = contexts
    try:
        yield
    finally:
        for module, attributes in before:
            for key in ("forward", CONTEXTS):
                vars(module).pop(key, None)
            vars(module).update(attributes)


def _forward_full(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call_block(self, *args, **kwargs)
    contexts = _buffers_once(self, getattr(self, CONTEXTS, None))
    more: dict[str, Any] = {"context_fn": contexts} if contexts else {}  # dynamo refuses torch's no-op context_fn
    return checkpoint(call_block, self, *args, use_reentrant=False, **more, **_without_cache(kwargs))


def _forward_selective(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call_block(self, *args, **kwargs)
    contexts = _buffers_once(self, getattr(self, CONTEXTS, keep_products))
    return checkpoint(call_block, self, *args, use_reentrant=False, context_fn=contexts, **_without_cache(kwargs))


def _buffers_once(module: nn.Module, contexts: Any) -> Any:
    """`contexts`, and that the recomputation changes no buffer of the module: forward has done so. A compiled block sees to that
    itself, as its graph changes buffers at its end."""
    if torch.compiler.is_compiling() or not (buffers := buffers_of(module)):
        return contexts

    def both() -> Any:
        forward, again = contexts() if contexts else (nullcontext(), nullcontext())
        watch = Watch(buffers)

        @contextmanager
        def recompute() -> Iterator[None]:
            with borrowed_buffers(watch.seen), again:
                yield

        return watch.during(forward), recompute()

    return both


def keep_products() -> Any:
    """Torch's contexts for selective remat: one for the forward, one for the recomputation."""
    return create_selective_checkpoint_contexts(KEPT)


def keep_products_by(module: nn.Module, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Any]) -> None:
    """Let what selective remat keeps of a module go through `pack` and `unpack`. Torch's contexts bypass saved-tensor hooks."""

    def contexts() -> Any:
        kept: dict[Any, deque[Any]] = {func: deque() for func in KEPT}
        return _KeepProducts(kept, pack), _ReuseProducts(kept, unpack)

    vars(module)[CONTEXTS] = contexts


class _KeepProducts(TorchDispatchMode):
    """In forward: keep the results of the operators in KEPT."""

    def __init__(self, kept: dict[Any, deque[Any]], pack: Callable[[Tensor], Any]):
        super().__init__()
        self.kept, self.pack = kept, pack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.kept:
            self.kept[func].append(tree_map(lambda leaf: self.pack(leaf) if isinstance(leaf, Tensor) else leaf, out))
        return out


class _ReuseProducts(TorchDispatchMode):
    """In the recomputation: return kept results in the same order, instead of computing them."""

    def __init__(self, kept: dict[Any, deque[Any]], unpack: Callable[[Any], Any]):
        super().__init__()
        self.kept, self.unpack = kept, unpack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.kept:
            return func(*args, **(kwargs or {}))
        return tree_map(self.unpack, self.kept[func].popleft())


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop the key-value cache of Hugging Face blocks: the recomputation would append to it a second time."""
    return {**kwargs, "past_key_values": None} if kwargs.get("past_key_values") is not None else kwargs
