"""Hooks that do not keep their owner alive."""

import weakref
from collections.abc import Callable
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.on_torch.offload.units.offloaded_unit import OffloadedUnit


def gone() -> FullshardError:
    return FullshardError("the state of this model is gone; keep what shard() returned for as long as the model is used")


def weakly(method: Callable[..., None], *about: OffloadedUnit, needed: bool = False) -> Callable[..., None]:
    """A hook that keeps neither its method's object nor the units alive: see *Nothing refers back* in `tiered_optimizer`.
    `needed`: raise if the object is gone."""
    found, units = weakref.WeakMethod(method), [weakref.ref(unit) for unit in about]

    def call(*arguments: Any) -> None:
        if (alive := found()) is not None:
            alive(*(unit() for unit in units), *arguments)
        elif needed:
            raise gone()

    return call
