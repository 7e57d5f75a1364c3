"""A step as a transaction: what one that fails or is skipped puts back. Weights and moments are changed last, by the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fullshard.base.errors import FullshardError
from fullshard.on_torch.model.changing_buffers import BufferCopies, Watch

if TYPE_CHECKING:
    from fullshard.on_torch.parallelize.state import State


TORN = (
    "a step failed after some of its updates were done: without clipping, offloaded units are updated during backward; load the "
    "last checkpoint, and set clip (optim.clip) so that a step that fails changes nothing"
)


class Transaction:
    """One step of a state. Knows buffers and random states before it."""

    def __init__(self, state: State):
        state.copies.refuse_torn()
        state.copies.rest()
        if not state.checks:  # which say more
            state.refuse_untrained()
        refuse_gradients(state)
        self.state = state
        self.random = _random_states(state.device)
        self.forwards = state.copies.forwards
        places = state.buffers.places()
        self.watch, first = Watch(places), bool(state.buffers.untried)  # of which many are constant: not on the device
        self.buffers = BufferCopies.of(places, torch.device("cpu") if first else None)

    def computed(self) -> None:
        """Forward and backward are done."""
        if self.state.buffers.untried:
            self.state.buffers.ran([-1, *self.state.copies.used_since(self.forwards)], self.watch)

    def undo(self, error: BaseException) -> None:
        """After an exception. Where weights have changed already, say so: the state is of no use then."""
        state = self.state
        torn = state.offload.abandon() if state.offload else False
        state.copies.abandon()
        reduce_all(state)
        self.buffers.restore()
        self._restore_random()
        if torn:
            state.copies.torn = TORN
            error.add_note(TORN)

    def undo_if(self, skipped: Tensor) -> None:
        """After the update. A GPU knows late whether it was skipped: the host does not wait, and only a step whose loss is
        scaled, which waits anyway, gives back its random numbers."""
        if self.buffers.saved:
            self.buffers.restore_if(skipped)
        if (self.state.device.type != "cuda" or self.state.loss_scale is not None) and bool(skipped):
            self._restore_random()

    def _restore_random(self) -> None:
        torch.set_rng_state(self.random[0])
        if self.random[1] is not None:
            torch.cuda.set_rng_state(self.random[1], self.state.device)


def _random_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def reduce_all(state: State) -> None:
    """Reduce all gradients of the next backward and free what it gathered, as for the last micro-batch of a step."""
    for modules in state.unit_modules.values():
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)


def refuse_gradients(state: State) -> None:
    """Raise if a parameter has a gradient that is not this step's: it would be added, or not, as its unit's home has it."""
    name = state.copies.with_gradient()
    if name is not None:
        raise FullshardError(
            f"train_step computes the gradient of its own batches, but {name} has one already; call "
            "state.optimizer.zero_grad() before it, or give train_step all micro-batches"
        )
