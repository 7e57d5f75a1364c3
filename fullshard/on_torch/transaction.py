"""A step as a transaction: what one that fails or is skipped puts back. Weights and moments are changed last, by the update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fullshard.errors import FullshardError
from fullshard.on_torch.changing_buffers import BufferCopies, Place, Watch, statistics

if TYPE_CHECKING:
    from fullshard.on_torch.state import State


TORN = (
    "a step failed after some of its updates were done: without clipping, offloaded units are updated during backward; load the "
    "last checkpoint, and set clip (optim.clip) so that a step that fails changes nothing"
)


class Transaction:
    """One step of a state. Knows buffers and random states before it."""

    def __init__(self, state: State):
        state.refuse_torn()
        state.copies.rest()
        refuse_gradients(state)
        self.state = state
        self.random = _random_states(state.device)
        self.watch: Watch | None = None
        if state.changing is None:  # the first step, which shows what forward changes: copies of all buffers, on the host
            self.watch = Watch(state.model)
            every = [(m, n) for m in state.model.modules() for n in m._buffers]
            self.buffers = BufferCopies.of(every, torch.device("cpu"))
        else:
            self.buffers = BufferCopies.of(state.changing)

    def computed(self) -> None:
        """Forward and backward are done."""
        if self.watch is not None:
            places: list[Place] = [*statistics(self.state.model), *self.watch.changed()]
            self.state.changing, self.buffers = places, self.buffers.only(places)

    def undo(self, error: BaseException) -> None:
        """After an exception. Where weights have changed already, say so: the state is of no use then."""
        state = self.state
        torn = state.offload.abandon() if state.offload else False
        state.copies.abandon()
        self.buffers.restore()
        self._restore_random()
        if torn:
            state.torn = TORN
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


def refuse_gradients(state: State) -> None:
    """Raise if a parameter has a gradient that is not this step's: it would be added, or not, as its unit's home has it."""
    name = state.copies.with_gradient()
    if name is not None:
        raise FullshardError(
            f"train_step computes the gradient of its own batches, but {name} has one already; call "
            "state.optimizer.zero_grad() before it, or give train_step all micro-batches"
        )
