"""Saves a state of JAX: what `fullshard.checkpoint.saver` leaves to the engine."""

import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fullshard.checkpoint.manifest_records import ManifestFields
from fullshard.checkpoint.retention import Retention
from fullshard.checkpoint.saver import CheckpointSaver, CopiedChecksum, Saving
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.ranks.processes import is_first, own_agreement
from fullshard.on_jax.saving.array_staging import ArrayStaging
from fullshard.on_jax.saving.state_arrays import checkpoint_bytes, checks, state_arrays, without_slots


class JaxCheckpointer(CheckpointSaver):
    """Saves a state to a directory of checkpoints, as often as `save` is called. The constructor and all methods except `names`
    and `release` are collective.

    `save` copies the state to host memory, since the next step donates its arrays; a background thread writes the copy. At most
    one save is in flight; the next waits for it. If the copy needs more host memory than `room` bytes, or than is free, `save`
    returns when all is written.

    `overlap` changes nothing: a save always copies first and writes beside training.

    It holds the directory's lease until `close`: no other process writes or deletes there. `run` names the run in the lease.
    `keep`: which checkpoints retention leaves; by default all.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        state: JaxState,
        *,
        keep: Retention | None = None,
        overlap: bool = True,
        room: int | None = None,
        run: str = "",
    ):
        super().__init__(checkpoint_dir, own_agreement("checkpoint"), keep=keep, run=run)
        self.state, self.plan = state, state.plan.to_dict()
        self.staging: ArrayStaging = ArrayStaging(self.ranks, self.nodes, self.plan, room=room)

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
        """Copy the state as it is now, and start to write it. `overwrite`: replace another state of the same step. `prune`: let
        retention delete older checkpoints afterwards."""
        self.wait()
        state, staging = self.state, self.staging
        fields = ManifestFields(state.step, cursor, self.plan, recipe, numbers_of(state, extra), metrics or {})
        copies = staging.start(state_arrays(state), checks(state))
        note = staging.in_place_reason
        self.saving = saving = Saving(state.step, copies, note=note, prunes=prune, overwrites=overwrite)
        copied: CopiedChecksum = Future()
        copied.set_result(None)  # the checksum is computed while the disk writes
        if staging.in_place:
            self.write(saving, fields, copied)
            staging.forget_sources()
        else:
            self.write_in_background(saving, fields, copied)
        return saving

    def state_bytes(self) -> int:
        return checkpoint_bytes(self.state)


def numbers_of(state: JaxState, extra: dict[str, Any] | None) -> dict[str, Any]:
    """The parts of a state that are not tensors, as JSON for the manifest."""
    return {
        "engine": state.engine,
        "world": state.plan.mesh.devices,
        "optimizer": type(state.optimizer).__name__ if state.optimizer else None,
        "without_slots": without_slots(state),
        "slots": {},
        "loss_scale": None,
        "extra": extra or {},
    }


def save_checkpoint(checkpoint_dir: str | Path, state: JaxState, *, overwrite: bool = False, **options: Any) -> str:
    """Write one checkpoint and return where it is, once it is durable. `options`: as of `JaxCheckpointer.save`. Collective."""
    if state.optimizer is None and is_first():
        warnings.warn(f"this state has no optimizer: the checkpoint of step {state.step} holds weights only", stacklevel=4)
    writer = JaxCheckpointer(checkpoint_dir, state)
    try:
        return writer.save(overwrite=overwrite, **options).result()
    finally:
        writer.close()
