"""Saves a state of torch: what `fullshard.checkpoint.saver` leaves to the engine."""

import warnings
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.background_writer import Priority
from fullshard.checkpoint.manifest_records import ManifestFields
from fullshard.checkpoint.retention import Retention
from fullshard.checkpoint.saver import CheckpointSaver, Saving
from fullshard.on_torch.model.batch_norm import average_statistics
from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.ranks.rank_agreement import GroupAgreement
from fullshard.on_torch.saving import state_tensors
from fullshard.on_torch.saving.staging import Staging


class Checkpointer(CheckpointSaver):
    """Saves a state to a directory of checkpoints, as often as `save` is called. The constructor and all methods except
    `names` and `release` are collective.

    At most one save is in flight; the next waits for it. With `overlap`, tensors are copied during the next forward and
    backward, and the optimizer's step waits for the copies. Before you change weights by other means, call `staged` of the
    `Saving`. If the copies need more host memory than `room` bytes, or than is free, `save` returns when all is written.

    A Checkpointer holds the directory's lease until `close`: no other process writes or deletes there. `run` names the run
    in the lease. `keep`: which checkpoints retention leaves; by default all.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        state: State,
        *,
        keep: Retention | None = None,
        overlap: bool = False,
        room: int | None = None,
        run: str = "",
    ):
        ranks = GroupAgreement()
        priority: Priority = "idle" if overlap and state.device.type == "cpu" else "normal"
        super().__init__(checkpoint_dir, ranks, keep=keep, run=run, priority=priority)
        self.state, self.plan = state, state.plan.to_dict()
        self.staging: Staging = Staging(state, ranks, self.nodes, overlap=overlap, room=room)
        self.hook = None
        if self.staging.overlap and state.optimizer is not None:
            self.hook = state.optimizer.register_step_pre_hook(lambda *_: self.staging.wait_for_copies())

    def save(
        self,
        *,
        cursor: int | None = None,
        recipe: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        overwrite: bool = True,
        prune: bool = True,
    ) -> Saving:
        """Stage the state as it is now, and start to write it. `overwrite`: replace another state of the same step.
        `prune`: let retention delete older checkpoints afterwards."""
        self.wait()
        average_statistics(self.state.model)
        state, staging = self.state, self.staging
        with torch.no_grad(), state.values(at_rest=True) as values:
            slots = state_tensors.all_slots(state, values)
            numbers = state_tensors.numbers_of(state, slots) | {"extra": extra or {}}
            fields = ManifestFields(state.step, cursor, self.plan, recipe, numbers, metrics or {})
            copies = staging.start(values, slots)
            note = staging.in_place_reason
            self.saving = saving = Saving(state.step, copies, note=note, prunes=prune, overwrites=overwrite)
            if staging.in_place:  # inside the context: the values must stay as they are until they are written
                self.write(saving, fields, staging.worker.submit(copies.finish))
        if staging.in_place or state.offload or state_tensors.coded_optimizer(state) is not None:
            staging.forget_sources()
        if not staging.in_place:
            self.write_in_background(saving, fields, staging.worker.submit(copies.finish))
        return saving

    def close(self) -> None:
        """Wait for the save in flight; free the host memory of the copies and the lease."""
        if self.hook:
            self.wait()
            self.hook.remove()
        super().close()

    def state_bytes(self) -> int:
        return state_tensors.checkpoint_bytes(self.state)


def save_checkpoint(checkpoint_dir: str | Path, state: State, *, overwrite: bool = False, **options: Any) -> str:
    """Write one checkpoint and return where it is, once it is durable. `options`: as of `Checkpointer.save`. Collective."""
    if state.optimizer is None and any(p.requires_grad for p in state.parameters()) and torch.distributed.get_rank() == 0:
        warnings.warn(
            f"this state has no optimizer: the checkpoint of step {state.step} holds weights only, and steps are not counted; "
            "if you train it with an optimizer of your own, write state.optimizer = yours first",
            stacklevel=4,
        )
    checkpointer = Checkpointer(checkpoint_dir, state)
    try:
        return checkpointer.save(overwrite=overwrite, **options).result()
    finally:
        checkpointer.close()
