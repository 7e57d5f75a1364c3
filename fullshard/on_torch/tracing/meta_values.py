"""Values for the few meta tensors whose values a model reads.

Models branch on masks and positions, and loop over the experts that tokens chose. Small integer and boolean tensors that
depend only on the batch or on constants are also computed on the CPU. Choices that depend on activations (`topk`) are
spread evenly.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fullshard.on_torch.tracing.meta_outputs import call_meta, name_of, tensors_in

aten = torch.ops.aten
LOCAL_SCALAR, INDEX, TOPK = aten._local_scalar_dense.default, aten.index.Tensor, aten.topk.default
ADDMM_DTYPE_OUT = getattr(aten.addmm, "dtype_out", None)
ALL_TO_ALL = "_c10d_functional::all_to_all_single"
VALUE = "_fullshard_value"  # an attribute of tensors whose values are known: whose they are, and the values
MAX_ELEMENTS = 1 << 22  # larger tensors are not computed; models do not branch on them
MAX_CONSTANT = 1 << 16  # of floats
DISCRETE = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class MetaValues:
    """The known values of meta tensors."""

    def set(self, tensor: Tensor, value: Tensor) -> None:
        setattr(tensor, VALUE, (self, value))  # lives as long as the tensor does

    def get(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, if they are known."""
        found = getattr(tensor, VALUE, None)
        return found[1] if found is not None and found[0] is self else None

    def _are_known(self, tensors: list[Tensor]) -> bool:
        for tensor in tensors:
            found = getattr(tensor, VALUE, None)
            if tensor.is_meta and (found is None or found[0] is not self):
                return False
        return not tensors or any(tensor.is_meta for tensor in tensors)

    def call(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Call `func` on meta tensors. If all `tensors` of its arguments have values, also compute those of the result. Some
        may be on the CPU, such as the positions of `ids[:, [-1, 0]]`."""
        known = self._are_known(tensors)
        if func is LOCAL_SCALAR and known:
            return self._value(args[0]).item()
        if func is INDEX:
            args = (args[0], [self._positions(i) for i in args[1]])
        if func is ADDMM_DTYPE_OUT:  # torch 2.11's meta kernel mistakes the dtype for a factor
            return kwargs["out"]
        if not tensors and "empty" in name_of(func):
            known = False  # uninitialised
        try:
            out = call_meta(func, args, kwargs)
        except NotImplementedError:
            if not known:
                raise
            out = tree_map(_to_meta, self._compute(func, args, kwargs))
        if name_of(func) == ALL_TO_ALL and (choices := self.get(args[0])) is not None:
            self.set(out, choices)  # the ranks' choices are alike
        elif func is TOPK and not known:
            self.set(out[1], _even(out[1], args[0].shape[-1]))
        elif known:
            self._set_result(func, args, kwargs, out, constant=not tensors)
        elif isinstance(out, Tensor) and self.get(out) is not None and func._schema.is_mutable:
            delattr(out, VALUE)  # written to with values that are not known
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` on the values, on the CPU."""
        on_cpu = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        return func(*tree_map(self._value, args), **tree_map(self._value, on_cpu))

    def _value(self, leaf: Any) -> Any:
        return self.get(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf

    def _set_result(self, func: Any, args: Any, kwargs: Any, out: Any, constant: bool) -> None:
        """Compute and keep the values of `out`, if they are discrete and small. `constant`: they depend on no tensor; floats are
        kept then, too, such as OPT's own attention mask of ones."""
        outputs, largest = tensors_in(out), MAX_CONSTANT if constant else 0
        if not outputs or any(t.numel() > (MAX_ELEMENTS if t.dtype in DISCRETE else largest) for t in outputs):
            return
        try:
            values = tensors_in(self._compute(func, args, kwargs))
        except NotImplementedError:  # an operator without a CPU kernel
            return
        for t, value in zip(outputs, values, strict=True):
            self.set(t, value)

    def _positions(self, index: Tensor | None) -> Tensor | None:
        """Replace a boolean index by the positions it selects: a meta tensor does not know how many there are."""
        value = self.get(index) if index is not None and index.dtype is torch.bool else None
        if value is None:
            return index
        found = value.nonzero(as_tuple=True)
        return torch.empty(found[0].shape, dtype=torch.int64, device="meta") if len(found) == 1 else index


def with_index_values(index: Any) -> Any:
    """An index whose lists are tensors on the CPU. Torch would make tensors on meta of them, without values."""
    if isinstance(index, tuple):
        return tuple(map(with_index_values, index))
    return torch.tensor(index) if isinstance(index, list) and all(isinstance(i, int) for i in index) else index


def _to_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf


def _even(like: Tensor, choices: int) -> Tensor:
    """Choices from 0 to `choices` - 1, each equally often."""
    return (torch.arange(like.numel()) % choices).view(like.shape)
