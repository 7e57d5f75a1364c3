"""Saves a sharded state: each rank writes its own file, and all ranks agree on whether the save worked.

A save has two halves. Staging copies this rank's items into host memory; training may then go on. A background thread does
the rest: each rank writes its file into a staging directory, and the first rank collects the checksums and commits. Without
a shared disk, the first rank of each node commits for its node.
"""

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint import commit
from fullshard.checkpoint.lease import Lease, LeaseLostError, take_lease
from fullshard.checkpoint.place import Local, Place, open_place
from fullshard.checkpoint.pruning import Inventory
from fullshard.checkpoint.retention import CheckpointSummary, Retention
from fullshard.errors import FullshardError
from fullshard.on_torch.agree import (
    acquire_group,
    attempt,
    decide,
    gather,
    gather_integers,
    gather_results,
    gather_then_finish,
    release_group,
)
from fullshard.on_torch.running_statistics import average_statistics
from fullshard.on_torch.saving import state_tensors
from fullshard.on_torch.saving.background import Background
from fullshard.on_torch.saving.manifest_records import ManifestFields, file_records, make_manifest
from fullshard.on_torch.saving.nodes import find_nodes
from fullshard.on_torch.saving.pending_copies import PendingCopies
from fullshard.on_torch.saving.restore import find_damage
from fullshard.on_torch.saving.staging import NotFiniteError, Staging
from fullshard.on_torch.state import State
from fullshard.text import bytes_text

CopiedChecksum = Future[str | None]  # resolves when the copies of a save are made, to their checksum if there is one
HEADERS = 1 << 20  # bytes: about what a checkpoint takes besides its tensors


@dataclasses.dataclass
class Saving:
    """A save under way. `result` waits for it, and returns where the checkpoint is or raises the same error on all ranks.

    `note` is a sentence about the save for the user, if there is one. `messages` are sentences of retention about other
    checkpoints. After a failure `not_finite` or `lease_lost` may say why: a weight was not finite, or another process has
    taken the directory.
    """

    step: int
    copies: PendingCopies
    finished: Future[None] = dataclasses.field(default_factory=Future)
    where: str = ""
    error: str | None = None
    note: str = ""
    prunes: bool = True  # whether retention may delete older checkpoints after this save
    not_finite: bool = False
    lease_lost: bool = False
    messages: list[str] = dataclasses.field(default_factory=list)

    def staged(self) -> None:
        """Wait until the state may be changed by any means."""
        self.copies.done.wait()

    def done(self) -> bool:
        return self.finished.done()

    def result(self) -> str:
        self.finished.result()
        if self.error is not None:
            raise FullshardError(self.error)
        return self.where


class Checkpointer:
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
        self.checkpoint_dir, self.state, self.keep = open_place(checkpoint_dir), state, keep
        self.inventory: Inventory | None = None  # read when retention first runs
        self.verified: set[str] = set()  # checkpoints whose checksums were compared before that
        self.group = acquire_group()
        self.nodes = find_nodes(self.checkpoint_dir, self.group)
        self.lease: Lease | None = None  # on the leader of each node
        self._take_lease(run)
        self.nonce, self.count = decide(self.group, commit.new_nonce), 0  # together they name the staging directories
        self.plan = state.plan.to_dict()
        self.staging = Staging(state, self.group, self.nodes, overlap=overlap, room=room)
        self.background = Background("checkpoint", priority="idle" if overlap and state.device.type == "cpu" else "normal")
        self.saving: Saving | None = None
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
        self.overwrite = overwrite
        state, staging = self.state, self.staging
        with torch.no_grad(), state.values(at_rest=True) as values:
            slots = state_tensors.all_slots(state, values)
            numbers = state_tensors.numbers_of(state, slots) | {"extra": extra or {}}
            fields = ManifestFields(state.step, cursor, self.plan, recipe, numbers, metrics or {})
            self.count += 1
            copies = staging.start(values, slots)
            self.saving = saving = Saving(state.step, copies, note=staging.in_place_reason, prunes=prune)
            if staging.in_place:  # inside the context: the values must stay as they are until they are written
                self._write(saving, fields, staging.worker.submit(copies.finish))
        if staging.in_place or state.offload:
            staging.forget_sources()
        if not staging.in_place:
            copied = staging.worker.submit(copies.finish)
            copied.add_done_callback(lambda _: self.background.submit(partial(self._write, saving, fields, copied)))
        return saving

    def wait(self) -> None:
        """Wait until no save is in flight. Raises nothing: see the `Saving` for the outcome."""
        if self.saving:
            self.saving.finished.result()

    def close(self) -> None:
        """Wait for the save in flight; free the host memory of the copies and the lease."""
        self.wait()
        if self.hook:
            self.hook.remove()
        self.background.close()
        self.staging.close()
        self.release()
        release_group(self.group)

    def release(self) -> None:
        """Give up the lease. Not collective: for when other ranks are gone and `close` cannot be called."""
        if self.lease:
            self.lease.release()
            self.lease = None

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(gather(self.group, flag))

    def _take_lease(self, run: str) -> None:
        def take() -> list[int]:
            self.lease = take_lease(self.checkpoint_dir, run) if self.nodes.is_leader else None
            return []

        try:
            gather_integers(self.group, take, 0)
        except FullshardError:
            self.release()
            release_group(self.group)
            raise

    # -- writing ---------------------------------------------------------------------------------------

    def _write(self, saving: Saving, fields: ManifestFields, copied: CopiedChecksum) -> None:
        """Write, commit and prune. An error is stored in `saving`, the same sentence on all ranks."""
        try:
            saving.where = self._write_and_commit(saving, fields, copied)
            if saving.prunes:
                self._prune(saving, fields)
        except FullshardError as error:
            saving.error = f"the checkpoint of step {saving.step} was not saved: {error}"
        except Exception as error:  # another rank is gone; training will find out by itself
            saving.error = f"the checkpoint of step {saving.step} was not saved: {type(error).__name__}: {error}"
        finally:
            saving.finished.set_result(None)

    def _write_and_commit(self, saving: Saving, fields: ManifestFields, copied: CopiedChecksum) -> str:
        self.failure: Exception | None = None  # this rank's, where its kind matters
        pending = commit.pending_checkpoint(self.checkpoint_dir, fields.step, f"{self.nonce}{self.count:04x}")
        write, finish = partial(self._write_file, pending, copied), partial(self._commit, pending, fields)
        try:
            with contextlib.ExitStack() as locks:
                if isinstance(self.checkpoint_dir, Local):
                    gather_then_finish(self.group, self.nodes.leaders, lambda: self._begin(locks, pending) + write(), 3, finish)
                else:  # the leader removes what is left of an old checkpoint before any rank writes
                    began = gather_integers(self.group, lambda: self._begin(locks, pending) if self.nodes.is_leader else [0], 1)
                    gather_then_finish(self.group, self.nodes.leaders, lambda: began[0] + write(), 3, finish)
        except FullshardError:
            lease_lost, not_finite = isinstance(self.failure, LeaseLostError), isinstance(self.failure, NotFiniteError)
            if self.nodes.is_leader and not lease_lost:
                attempt(lambda: commit.abandon(pending))
            flags = gather(self.group, (lease_lost, not_finite))
            saving.lease_lost, saving.not_finite = (any(of_rank) for of_rank in zip(*flags, strict=True))
            raise
        return str(pending.target)

    def _begin(self, locks: contextlib.ExitStack, pending: commit.PendingCheckpoint) -> list[int]:
        """Check lease and space, then create the staging directory. Returns the time in milliseconds since 1970; the
        manifest gets the first rank's."""
        now = round(time.time() * 1000)
        self._check_lease()
        if not self.overwrite and not isinstance(self.checkpoint_dir, Local) and commit.is_checkpoint(pending.target):
            raise FullshardError(another_state(pending.target))  # an object store has no staging directory
        refuse_full(self.checkpoint_dir, self.staging.node_bytes + HEADERS, "its files", pending.staging)
        locks.enter_context(commit.begin(pending))
        return [now]

    def _check_lease(self) -> None:
        try:
            if self.lease:
                self.lease.check()
        except LeaseLostError as error:
            self.failure = error
            raise

    def _write_file(self, pending: commit.PendingCheckpoint, copied: CopiedChecksum) -> list[int]:
        """Write this rank's file; return its checksum as two integers."""
        checksum = copied.result()
        if not self.staging.layout.items:
            return [0, 0]
        try:
            return checksum_to_ints(self.staging.write(pending.staging, checksum))
        except NotFiniteError as error:
            self.failure = error
            raise
        except OSError as error:
            raise FullshardError(f"{pending.staging}: {error.strerror or error}") from None

    def _commit(self, pending: commit.PendingCheckpoint, fields: ManifestFields, results: list[list[int]]) -> None:
        """Write the manifest and make the checkpoint visible. `results`: time and checksum of each rank. Without a shared
        disk each node has its own manifest, which names the copies on its own disk."""
        staging = self.staging
        self._check_lease()
        files = file_records(staging.files, [ints_to_checksum(ints) for _, *ints in results], self.nodes.of_file)
        if not self.overwrite and commit.is_checkpoint(pending.target):
            read, old = attempt(partial(commit.read_manifest, pending.target))
            if not read or old.files != files:
                raise FullshardError(another_state(pending.target))
        manifest = make_manifest(staging.records, files, fields, results[0][0] / 1000)
        try:
            commit.commit(pending, manifest.to_bytes(staging.manifest_texts))
        except OSError as error:
            raise FullshardError(f"{pending.target}: {error.strerror or error}") from None

    def _prune(self, saving: Saving, fields: ManifestFields) -> None:
        """Delete the checkpoints that retention lets go, on each node's leader. An error here does not fail the save."""
        if not (self.keep and self.keep.last and self.nodes.is_leader):
            return
        worked, found = attempt(lambda: self._prune_own(self.keep, fields))
        saving.messages = found if worked else [f"old checkpoints stay in {self.checkpoint_dir}: {found}"]

    def _prune_own(self, keep: Retention | None, fields: ManifestFields) -> list[str]:
        """Returns sentences about damaged checkpoints that were found."""
        assert keep is not None
        reported = set(self.inventory.damaged) if self.inventory else set()
        if self.inventory is None:
            self.inventory = Inventory.of(self.checkpoint_dir)
            self.inventory.verified |= self.verified
        inventory = self.inventory
        inventory.add(CheckpointSummary(fields.step, time.time(), fields.metrics))
        for name in inventory.removable(keep):
            self._check_lease()
            removed, _ = attempt(partial(commit.remove, self.checkpoint_dir, name))
            if removed or not self._has(name):
                inventory.forget(name)
        new = {n: why for n, why in inventory.damaged.items() if n not in reported}
        return [f"{n} stays and does not count: {why}" for n, why in new.items() if self._has(n)]

    # -- the directory of checkpoints ------------------------------------------------------------------

    def _has(self, name: str) -> bool:
        return commit.is_checkpoint(self.checkpoint_dir.child(name))

    def sweep(self) -> None:
        """Remove what killed runs left behind."""
        gather_results(self.group, lambda: commit.sweep(self.checkpoint_dir) if self.nodes.is_leader else None)

    def discard(self, step: int) -> None:
        """Remove the checkpoint of a step."""
        name = commit.checkpoint_name(step)

        def remove() -> None:
            self._check_lease()
            commit.remove(self.checkpoint_dir, name)
            if self.inventory:
                self.inventory.forget(name)

        gather_results(self.group, lambda: remove() if self.nodes.is_leader else None)

    def names(self) -> list[str]:
        """The checkpoints that this rank sees. Not collective."""
        return commit.committed(self.checkpoint_dir)

    def refuse_no_space(self, count: int) -> None:
        """Raise if there is no space for `count` checkpoints, counting those that are there."""
        size = state_tensors.checkpoint_bytes(self.state) // self.nodes.count + HEADERS
        missing = max(0, count - len(self.names())) * size
        what = f"{count} checkpoints of {bytes_text(size)}"
        gather_results(self.group, lambda: refuse_full(self.checkpoint_dir, missing, what) if self.nodes.is_leader else None)

    def newest(self, below: float = math.inf) -> tuple[Place | None, list[str]]:
        """The newest undamaged checkpoint of a step below `below`, and a sentence about each damaged one that is newer."""
        everywhere = gather(self.group, commit.committed(self.checkpoint_dir) if self.nodes.is_leader else None)
        names = [n for n in everywhere[0] if all(n in found for found in everywhere if found is not None)]
        damaged: list[str] = []
        for name in reversed([n for n in names if (commit.step_of(n) or 0) < below]):
            place = self.checkpoint_dir.child(name)
            found = find_damage(place, self.group, self.nodes)
            if not found:
                self.verified.add(name)
                return place, damaged
            damaged.append(found[0])
        return None, damaged


def another_state(target: Place) -> str:
    return (
        f"{target} holds another state already; let the steps be counted (state.optimizer = the one that you step), save to "
        "another directory, or pass overwrite=True"
    )


def checksum_to_ints(checksum: str) -> list[int]:
    """A checksum of 128 bits as two signed 64-bit integers, which an integer tensor can carry."""
    data = bytes.fromhex(checksum)
    return [int.from_bytes(half, "big", signed=True) for half in (data[:8], data[8:])]


def ints_to_checksum(ints: Sequence[int]) -> str:
    """The inverse of `checksum_to_ints`."""
    return b"".join(half.to_bytes(8, "big", signed=True) for half in ints).hex()


def refuse_full(checkpoint_dir: Place, needed: int, what: str, begun: Place | None = None) -> None:
    """Raise if the disk has less than `needed` bytes free. `begun`: a directory whose files count as free, because they
    are part of `needed`."""
    free = checkpoint_dir.free()
    if free is not None and free < needed and begun is not None:
        free += sum(begun.files().values())
    if free is not None and free < needed:
        raise FullshardError(
            f"{checkpoint_dir} has {bytes_text(free)} free, but {what} take {bytes_text(needed)}; make room, or keep fewer"
        )


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
