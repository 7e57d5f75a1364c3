"""Values for the few meta tensors whose values a model looks at.

Models branch on masks and positions, and loop over the experts that tokens chose. Integers and booleans
that come from the batch or from nowhere are computed for real beside their meta tensors; choices that hang
on activations are made evenly.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
SMALL = 1 << 22  # elements: what is not worth computing is not looked at either
DISCRETE = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Shadows:
    """Meta tensors with values."""

    def __init__(self) -> None:
        self.values = WeakTensorKeyDictionary()

    def set(self, tensor: Tensor, value: Tensor) -> None:
        self.values[tensor] = value

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func` on meta tensors, and on their values where all have one."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = all(t in self.values for t in tensors)
        if func is aten._local_scalar_dense.default and known:
            return self.values[args[0]].item()
        if func is aten.index.Tensor:
            args = (args[0], [self._positions(i) for i in args[1]])
        if func is getattr(aten.addmm, "dtype_out", None):  # torch 2.11 takes its dtype for a factor on meta tensors
            return kwargs["out"]
        if not tensors and "empty" in func._schema.name:
            known = False  # holds nothing yet
        try:
            out = func(*args, **kwargs)
        except NotImplementedError:
            if not known:
                raise
            out = tree_map(_to_meta, self._real(func, args, kwargs))
        if func is aten.topk.default and not known:
            self.set(out[1], _even(out[1], args[0].shape[-1]))
        elif known:
            self._follow(func, args, kwargs, out)
        return out

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        on_cpu = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        return func(*tree_map(self._value, args), **tree_map(self._value, on_cpu))

    def _value(self, leaf: Any) -> Any:
        return self.values[leaf] if isinstance(leaf, Tensor) else leaf

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if not outputs or any(t.dtype not in DISCRETE or t.numel() > SMALL for t in outputs):
            return
        try:
            values = [t for t in tree_leaves(self._real(func, args, kwargs)) if isinstance(t, Tensor)]
        except NotImplementedError:  # a kernel that only CUDA has
            return
        for t, value in zip(outputs, values, strict=True):
            self.set(t, value)

    def _positions(self, index: Tensor | None) -> Tensor | None:
        """A boolean index as the positions it picks: their number is not known to a meta tensor."""
        if index is None or index.dtype is not torch.bool or index not in self.values:
            return index
        found = self.values[index].nonzero(as_tuple=True)
        return torch.empty(found[0].shape, dtype=torch.int64, device="meta") if len(found) == 1 else index


def _to_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf


def _even(like: Tensor, choices: int) -> Tensor:
    """Every choice equally often."""
    return (torch.arange(like.numel()) % choices).view(like.shape)
