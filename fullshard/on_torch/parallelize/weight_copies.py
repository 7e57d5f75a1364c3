"""Which copies of the weights are current: the one mechanism that readers and writers of a state ask.

A weight exists as its shard, which the optimizer updates, as what forward and backward gather of it, and, of an offloaded unit,
as a master elsewhere whose update may still be under way. Between forward and backward, and after both, the model shows its
shards. Whoever reads or writes them from outside calls `rest` first, and `changed` after writing.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.base.errors import FullshardError
from fullshard.on_torch.private.fsdp_iteration import (
    Stamp,
    UnitCopies,
    in_backward,
    reset_iteration,
    runs_now,
    unfinished,
    unit_copies,
)


class WeightCopies:
    """The copies of all units of one model. Made by `shard` when all else is."""

    def __init__(self, model: nn.Module):
        self.model = weakref.ref(model)
        self.changes = self.forwards = 0
        self.torn = ""  # why the weights are of no use, after a step that failed in the middle of its updates
        self.keeping = False  # forwards without gradients leave weights gathered for the next
        self.on_change: list[Callable[[], None]] = []  # called when weights have changed
        self.on_forward: list[Callable[[], None]] = []  # called before each forward
        self.on_forward_end: list[Callable[[], None]] = []  # called after each forward that did not fail
        self.on_backward: list[Callable[[], None]] = []  # called after each backward
        self.on_reset: list[Callable[[], None]] = []  # called after a forward or backward that failed
        self.units: list[UnitCopies] = unit_copies(model, self._now, self._backward_ended)
        _OF_MODEL[model] = weakref.ref(self)  # the model's hooks keep it alive
        model.register_forward_pre_hook(self._forward_begins, prepend=True)
        model.register_forward_hook(self._forward_ended, always_call=True)

    def _now(self) -> Stamp:
        return Stamp(self.changes, self.forwards)

    # -- around forwards -----------------------------------------------------------------------------------

    def _forward_begins(self, model: nn.Module, args: Any) -> None:
        if in_backward():  # a recomputation of the whole model
            return
        self.refuse_torn()
        for call in self.on_forward:
            call()
        if unfinished(model):
            self._reset(model)
        if not self.keeping:
            self.forwards += 1

    def _forward_ended(self, model: nn.Module, args: Any, output: Any) -> None:
        """Also after an exception."""
        if in_backward():
            return
        if unfinished(model):
            self._reset(model)
            return
        for call in self.on_forward_end:
            call()
        if torch.is_grad_enabled() or self.keeping:
            self._show_shards()
        else:
            self.free()

    def _backward_ended(self, unit: UnitCopies) -> None:
        """For each unit."""
        unit.show_shards()
        for call in self.on_backward if unit is self.units[0] else ():
            call()

    def _reset(self, model: nn.Module) -> None:
        reset_iteration(model)
        for call in self.on_reset:
            call()

    def _show_shards(self) -> None:
        for unit in self.units:
            unit.show_shards()

    # -- for readers and writers ---------------------------------------------------------------------------

    def rest(self) -> None:
        """Before the state is read or written. Raises in the middle of a forward or backward; clears up after one that failed."""
        model = self._model()
        if in_backward() or (unfinished(model) and runs_now(model)):
            raise FullshardError(
                "the state cannot be read or written while its model's forward or backward runs; do it before or after"
            )
        self.clear_up()

    def clear_up(self) -> None:
        """Clear up after a forward or backward that failed, unless one runs."""
        model = self._model()
        failed = unfinished(model)
        if in_backward() or (failed and runs_now(model)):
            return
        if failed:
            self._reset(model)
        self._show_shards()

    def refuse_torn(self) -> None:
        """Raise if a step failed in the middle of its updates."""
        if self.torn:
            raise FullshardError(self.torn)

    def changed(self) -> None:
        """Weights have new values: what was gathered of the old ones is not used again."""
        self.changes += 1
        for call in self.on_change:
            call()

    def free(self) -> None:
        """Free all gathered weights; the shards remain."""
        for unit in self.units:
            unit.free()

    def modules(self) -> list[tuple[nn.Module, ...]]:
        """Of each unit, the outer ones first."""
        return [unit.modules for unit in self.units]

    def used_since(self, forwards: int) -> list[int]:
        """The indices of the units that ran after so many forwards of the model."""
        return [i for i, u in enumerate(self.units) if u.used_at is not None and u.used_at.forwards > forwards]

    def trained(self) -> tuple[bool, ...]:
        """Of every shard, whether it is trained."""
        return tuple(trained for unit in self.units for trained in unit.trained())

    def training_changed(self) -> None:
        """Other parameters than before may be trained."""
        for unit in self.units:
            unit.find_dtypes()

    def with_gradient(self) -> str | None:
        """The name of a parameter that has a gradient, reduced or not."""
        return next((name for unit in self.units if (name := unit.with_gradient()) is not None), None)

    def drop_gradients(self) -> None:
        """Drop all gradients, also those that wait for their reduction."""
        self.drop_unreduced()
        for p in self._model().parameters():
            p.grad = None

    def drop_unreduced(self) -> None:
        for unit in self.units:
            unit.drop_unreduced()

    def begin_step(self) -> None:
        """Forget which parameters backward has used."""
        for unit in self.units:
            unit.begin_step()

    def abandon(self) -> None:
        """After an exception in forward or backward: as if they had not begun."""
        self._reset(self._model())
        self.drop_gradients()

    def _model(self) -> nn.Module:
        model = self.model()
        assert model is not None, "whoever asks has the model"
        return model

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, forwards without gradients leave weights gathered for the next one, as nobody changes them."""
        before, self.keeping = self.keeping, True
        self.forwards += not before
        try:
            yield
        finally:
            self.keeping = before
            if not before:
                self.free()


_OF_MODEL: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[WeightCopies]]" = weakref.WeakKeyDictionary()


def weight_copies(model: nn.Module) -> WeightCopies | None:
    """Of a model that `shard` has made."""
    found = _OF_MODEL.get(model)
    return found() if found is not None else None


def clear_all_gradients(copies: WeightCopies, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's `zero_grad` drop gradients that wait for their reduction as well."""
    own, found = type(optimizer).zero_grad, weakref.ref(optimizer)
    optimizer.zero_grad = partial(_zero_grad, own, found, copies)  # type: ignore[method-assign]


def _zero_grad(
    own: Callable[..., None], found: "weakref.ref[torch.optim.Optimizer]", copies: WeightCopies, *args: Any, **kwargs: Any
) -> None:
    copies.clear_up()
    copies.drop_unreduced()
    optimizer = found()
    assert optimizer is not None
    own(optimizer, *args, **kwargs)
