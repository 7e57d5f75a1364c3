"""Recomputing activations in backward, unit by unit.

The module's `forward` is replaced rather than the module wrapped: names in state dicts stay what they
are, and FSDP's hooks stay outside the recomputation.
"""

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fullshard.on_torch.private import TorchDispatchMode
from fullshard.plan import Remat

# What `selective` keeps: the results of matrix products and attention. Everything else is cheap to redo.
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def apply_remat(module: nn.Module, remat: Remat) -> None:
    """Make `module` keep only its inputs (`full`) or its matrix products (`selective`) for backward."""
    if remat != "none":
        forward = _forward_full if remat == "full" else _forward_selective
        # A bound method of one shared function, not a closure for each block: dynamo compiles it once.
        module.forward = types.MethodType(forward, module)


def _forward_full(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return type(self).forward(self, *args, **kwargs)
    contexts = getattr(self, "_fullshard_contexts", None)  # of a trace
    more = {"context_fn": contexts} if contexts else {}  # dynamo takes none that does nothing
    return checkpoint(type(self).forward, self, *args, use_reentrant=False, **more, **_without_cache(kwargs))


def _forward_selective(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return type(self).forward(self, *args, **kwargs)
    contexts = getattr(self, "_fullshard_contexts", keep_products)  # of activations that rest elsewhere, or of a trace
    return checkpoint(type(self).forward, self, *args, use_reentrant=False, context_fn=contexts, **_without_cache(kwargs))


def keep_products() -> Any:
    """What runs the forward of a block, and what runs it again."""
    return create_selective_checkpoint_contexts(KEPT)


def keep_products_by(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Any]) -> Any:
    """As torch's selective contexts, but what is kept goes through `pack` and `unpack`: theirs holds it out of the sight
    of autograd's hooks."""
    kept: dict[Any, deque[Any]] = {func: deque() for func in KEPT}
    return _Keep(kept, pack), _Again(kept, unpack)


class _Keep(TorchDispatchMode):
    """In forward: products are kept."""

    def __init__(self, kept: dict[Any, deque[Any]], pack: Callable[[Tensor], Any]):
        super().__init__()
        self.kept, self.pack = kept, pack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.kept:
            self.kept[func].append(tree_map(lambda leaf: self.pack(leaf) if isinstance(leaf, Tensor) else leaf, out))
        return out


class _Again(TorchDispatchMode):
    """In the recomputation: kept products are taken instead of computed, in the same order."""

    def __init__(self, kept: dict[Any, deque[Any]], unpack: Callable[[Any], Any]):
        super().__init__()
        self.kept, self.unpack = kept, unpack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.kept:
            return func(*args, **(kwargs or {}))
        return tree_map(self.unpack, self.kept[func].popleft())


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face blocks append to a key-value cache; done twice, the recomputation would see more keys."""
    return {**kwargs, "past_key_values": None} if kwargs.get("past_key_values") is not None else kwargs
