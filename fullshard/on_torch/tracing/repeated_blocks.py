"""Skip the computation of repeated blocks in a trace, and give each skipped block the trace of an equal one.

Of four or more equal blocks, the first two and the last are traced. The others only allocate their output and the
gradient of their input, as the traced blocks do.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fullshard.model.description import Description

MIN_EQUAL = 4  # equal blocks from which on some are skipped
SKIPPED = "_fullshard_skipped"  # an attribute of the classes of skipped blocks


class SeveralOutputsError(Exception):
    """A block returns more than one tensor. It cannot be skipped, because the use of the others is unknown."""


@contextmanager
def skip_repeated(model: nn.Module, description: Description) -> Iterator[dict[str, str]]:
    """Inside, repeated blocks are skipped. Gives the unit of each skipped block with the unit that stands for it."""
    path = {u.name: u.modules[0] for u in description.units}
    stand_ins: dict[str, str] = {}
    handles = []
    classes: list[tuple[nn.Module, type]] = []
    for names in _equal_blocks(model, description):
        traced = _TracedBlock()
        handles.append(model.get_submodule(path[names[1]]).register_forward_hook(traced.see_output))
        handles.append(model.get_submodule(path[names[-1]]).register_forward_hook(traced.watch_gradients, with_kwargs=True))
        for name in names[2:-1]:
            module = model.get_submodule(path[name])
            classes.append((module, type(module)))
            # A subclass, because remat sets `forward` on the instance.
            module.__class__ = type(type(module).__name__, (type(module),), {"forward": traced.skipping_forward(), SKIPPED: True})
            stand_ins[name] = names[1]
    try:
        yield stand_ins
    finally:
        for handle in handles:
            handle.remove()
        for module, original in classes:
            module.__class__ = original


def is_skipped(module: nn.Module) -> bool:
    return hasattr(type(module), SKIPPED)


def _equal_blocks(model: nn.Module, description: Description) -> list[list[str]]:
    """The units of equal blocks, by group, where there are enough of them."""
    groups: dict[str, list[str]] = {}
    inner = [m for u in description.units for m in u.modules]
    for unit in description.units:
        around = any(m.startswith(f"{unit.modules[0]}.") for m in inner)  # the units inside need their own phases
        if unit.kind == "block" and len(unit.modules) == 1 and not around:
            groups.setdefault(signature(model.get_submodule(unit.modules[0])), []).append(unit.name)
    return [names for names in groups.values() if len(names) >= MIN_EQUAL]


def signature(module: nn.Module) -> str:
    """A text that is equal for blocks of the same structure, sizes and plain settings. A block's index does not count."""
    rows = [repr(module)]
    for name, m in module.named_modules():
        plain = {k: v for k, v in vars(m).items() if isinstance(v, int | float | str | bool | None) and "idx" not in k}
        tensors = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in m.named_parameters(recurse=False)]
        rows.append(f"{name} {sorted(plain.items())} {tensors}")
    return "\n".join(rows)


class _TracedBlock:
    """What skipped blocks must imitate: the form of a block's output, and whether its gradient passes in place."""

    def __init__(self) -> None:
        self.other_outputs: tuple[Any, ...] | None = None  # what a block returns besides its activation
        self.output_gradient: Any = None  # a weak reference to the storage of the last block's output gradient
        self.passes_in_place = False  # whether the gradients of a block's output and input share memory

    def see_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) and not (isinstance(output, tuple) and sum(isinstance(t, Tensor) for t in output) == 1):
            raise SeveralOutputsError
        self.other_outputs = output[1:] if isinstance(output, tuple) else None

    def watch_gradients(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Hook the last block: its backward runs before those of the skipped blocks."""
        for t, hook in (
            (_activation(output), self._see_output_gradient),
            (_activation((args, kwargs)), self._see_input_gradient),
        ):
            if t.requires_grad:
                t.register_hook(hook)

    def _see_output_gradient(self, grad: Tensor) -> None:
        self.output_gradient = weakref.ref(grad.untyped_storage())

    def _see_input_gradient(self, grad: Tensor) -> None:
        before = self.output_gradient()  # None if it was freed: then an equal address means nothing
        self.passes_in_place = before is not None and before._cdata == grad.untyped_storage()._cdata

    def skipping_forward(self) -> Any:
        """A `forward` that computes nothing, and returns an output of the same form."""
        traced = self

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = _SkippedBlock.apply(_activation((args, kwargs)), traced)
            return out if traced.other_outputs is None else (out, *traced.other_outputs)

        return forward


class _SkippedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, traced: _TracedBlock) -> Tensor:
        ctx.traced = traced
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] if ctx.traced.passes_in_place else torch.empty_like(grads[0]), None


def _activation(tree: Any) -> Tensor:
    return next(t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point())
