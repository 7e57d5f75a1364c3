"""A tensor that is read when it is written to a file. Other libraries' saving code sees it in place of a shard."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fullshard.base.errors import FullshardError

Read = Callable[[], Tensor]


class DeferredTensor(Tensor):
    """A tensor on meta that knows how to read its values. What is made of it is deferred as well, until it is copied to a
    device, pickled, or asked for a number."""

    shape_only: Tensor
    read: Read

    @staticmethod
    def make(shape_only: Tensor, read: Read, *, parameter: bool = False) -> "DeferredTensor":
        """`shape_only`: the same tensor on meta. `parameter`: it is to pass for an `nn.Parameter`."""
        found = Tensor._make_subclass(DeferredTensor, shape_only)
        found.shape_only, found.read = shape_only, read
        found._is_param = parameter  # what isinstance(tensor, nn.Parameter) asks
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        named = kwargs or {}
        if func._schema.is_mutable:
            raise FullshardError(f"{func} writes to a sharded tensor while it is saved; change state.values(changed=True) before")
        if _wants_values(func, named):
            return _compute(func, args, named)
        # Other tensors go to meta too: only shapes are computed.
        shapes = func(*tree_map_only(Tensor, _on_meta, args), **tree_map_only(Tensor, _on_meta, named))
        compute = partial(_compute, func, args, named)
        if isinstance(shapes, Tensor):
            return cls.make(shapes, compute)
        return [cls.make(t, partial(_one_of, compute, i)) for i, t in enumerate(shapes)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)


def _wants_values(func: Any, named: dict[str, Any]) -> bool:
    """True if a function returns something other than tensors, or moves its tensor to a device."""
    device = named.get("device")
    moved = device is not None and torch.device(device).type != "meta"
    return moved or any("Tensor" not in str(r.type) for r in func._schema.returns)


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor.shape_only if isinstance(tensor, DeferredTensor) else tensor.to("meta")


def _compute(func: Any, args: Any, named: dict[str, Any]) -> Any:
    read = lambda t: t.read()
    return func(*tree_map_only(DeferredTensor, read, args), **tree_map_only(DeferredTensor, read, named))


def _one_of(compute: Callable[[], Any], index: int) -> Tensor:
    found: Tensor = compute()[index]
    return found
