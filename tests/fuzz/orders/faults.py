"""Faults that a caller meets inside a step: exceptions, and values that are not finite."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Fault(Exception):
    """What a caller's own code raises."""


PLACES = ("before", "block 0", "block 2", "after")
ERRORS: dict[str, type[Exception]] = {"fault": Fault, "memory": torch.OutOfMemoryError}


@dataclass(frozen=True)
class Trap:
    """Raises `before` the model's forward, inside a block, where its parameters are gathered, or `after` the forward; or where
    backward comes there. `micro`: in which micro-batch."""

    place: str
    backward: bool = False
    error: str = "fault"
    micro: int = 0

    def at(self, tensor: Tensor) -> Tensor:
        return _RaisesBackward.apply(tensor, self) if self.backward else self.spring()

    def spring(self) -> Any:
        raise ERRORS[self.error]("planted")


class _RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.trap.spring()


@contextmanager
def trapped(model: nn.Module, trap: Trap | None) -> Iterator[None]:
    """Inside, a trap for a block is set."""
    if trap is None or not trap.place.startswith("block"):
        yield
        return
    module = model.get_submodule(f"blocks.{trap.place.split()[1]}.up_proj")
    hook = module.register_forward_hook(lambda module, args, out: trap.at(out))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def scaled_activations(model: nn.Module, factor: float) -> Iterator[None]:
    """Inside, the first block computes with its normed inputs times the factor."""
    if factor == 1.0:
        yield
        return
    hook = model.get_submodule("blocks.0.norm").register_forward_hook(lambda module, args, out: out * factor)
    try:
        yield
    finally:
        hook.remove()
