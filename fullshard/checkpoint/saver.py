"""Saves a sharded state: each rank writes its own file, and all ranks agree on whether the save worked. Knows no engine.

A save has two halves. Staging, which is the engine's, copies this rank's items into host memory; training may then go on. A
background thread does the rest: each rank writes its file into a staging directory, and the first rank collects the checksums
and commits. Without a shared disk, the first rank of each node commits for its node.
"""

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fullshard.base.errors import FullshardError, attempt
from fullshard.base.text import bytes_text, listed
from fullshard.checkpoint import commit
from fullshard.checkpoint.background_writer import Background, Priority
from fullshard.checkpoint.directories import Local, Place, open_place
from fullshard.checkpoint.file_layout import SaveLayout
from fullshard.checkpoint.lease import Lease, LeaseLostError, take_lease
from fullshard.checkpoint.manifest_records import ManifestFields, file_records, make_manifest
from fullshard.checkpoint.pruning import Inventory
from fullshard.checkpoint.retention import CheckpointSummary, Retention
from fullshard.checkpoint.shared_disks import find_damage, find_nodes, list_on_nodes
from fullshard.ranks.agreement import RankAgreement

CopiedChecksum = Future[str | None]  # resolves when the copies of a save are made, to their checksum if there is one
HEADERS = 1 << 20  # bytes: about what a checkpoint takes besides its tensors


class NotFiniteError(FullshardError):
    """The weights hold NaN or infinity; no checkpoint of them is written."""


class FileStaging(Protocol):
    """An engine's staging. `shards`: the layout of the save in flight."""

    @property
    def shards(self) -> SaveLayout: ...

    def write(self, directory: Place, checksum: str | None) -> str:
        """Write this rank's file and return its checksum. `checksum`: the file's, if the copies have computed it. Raises a
        NotFiniteError if a weight is not finite."""

    def close(self) -> None: ...


class StagedCopies(Protocol):
    """The copies of a save. `done` is set when all are made."""

    done: threading.Event


@dataclass
class Saving:
    """A save under way. `result` waits for it, and returns where the checkpoint is or raises the same error on all ranks.

    `note` is a sentence about the save for the user, if there is one. `messages` are sentences of retention about other
    checkpoints. `seconds` and `nbytes`: from the call until the checkpoint was durable, and of its files. After a failure
    `not_finite` or `lease_lost` may say why: a weight was not finite, or another process has taken the directory.
    """

    step: int
    copies: StagedCopies
    finished: Future[None] = field(default_factory=Future)
    where: str = ""
    error: str | None = None
    note: str = ""
    prunes: bool = True  # whether retention may delete older checkpoints after this save
    overwrites: bool = True  # whether it may replace another state of the same step
    not_finite: bool = False
    lease_lost: bool = False
    messages: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    nbytes: int = 0

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


class CheckpointSaver(ABC):
    """Saves a state to a directory of checkpoints. An engine's subclass stages the state in `save`, and calls `write`.

    The constructor and all methods except `names` and `release` are collective. At most one save is in flight; the next waits
    for it. A saver holds the directory's lease until `close`: no other process writes or deletes there. `run` names the run in
    the lease. `keep`: which checkpoints retention leaves; by default all.
    """

    staging: FileStaging

    def __init__(
        self, checkpoint_dir: str | Path, ranks: RankAgreement, *, keep: Retention | None, run: str, priority: Priority = "normal"
    ):
        self.checkpoint_dir, self.ranks, self.keep = open_place(checkpoint_dir), ranks, keep
        self.inventory: Inventory | None = None  # read when retention first runs
        self.verified: set[str] = set()  # checkpoints whose checksums were compared before that
        self.nodes = find_nodes(self.checkpoint_dir, ranks)
        self.lease: Lease | None = None  # on the leader of each node
        self._take_lease(run)
        self.nonce, self.count = ranks.decide(commit.new_nonce), 0  # together they name the staging directories
        self.background = Background("checkpoint", priority=priority)
        self.saving: Saving | None = None

    @abstractmethod
    def state_bytes(self) -> int:
        """The size of a checkpoint of this state, without headers and manifest."""

    @abstractmethod
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
        """Stage the state as it is now, and start to write it. `overwrite`: replace another state of the same step. `prune`: let
        retention delete older checkpoints afterwards."""

    def wait(self) -> None:
        """Wait until no save is in flight. Raises nothing: see the `Saving` for the outcome."""
        if self.saving:
            self.saving.finished.result()

    def close(self) -> None:
        """Wait for the save in flight; free the host memory of the copies and the lease."""
        self.wait()
        self.background.close()
        self.staging.close()
        self.release()
        self.ranks.close()

    def release(self) -> None:
        """Give up the lease. Not collective: for when other ranks are gone and `close` cannot be called."""
        if self.lease:
            self.lease.release()
            self.lease = None

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.ranks.gather(flag))

    def _take_lease(self, run: str) -> None:
        def take() -> list[int]:
            self.lease = take_lease(self.checkpoint_dir, run) if self.nodes.is_leader else None
            return []

        try:
            self.ranks.gather_integers(take, 0)
        except FullshardError:
            self.release()
            self.ranks.close()
            raise

    # -- writing ---------------------------------------------------------------------------------------

    def write(self, saving: Saving, fields: ManifestFields, copied: CopiedChecksum) -> None:
        """Write, commit and prune. An error is stored in `saving`, the same sentence on all ranks."""
        try:
            saving.where = self._write_and_commit(saving, fields, copied)
            saving.seconds = time.monotonic() - saving.began
            saving.nbytes = sum(file.nbytes for file in self.staging.shards.files)
            if saving.prunes:
                self._prune(saving, fields)
        except FullshardError as error:
            saving.error = f"the checkpoint of step {saving.step} was not saved: {error}"
        except Exception as error:  # another rank is gone; training will find out by itself
            saving.error = f"the checkpoint of step {saving.step} was not saved: {type(error).__name__}: {error}"
        finally:
            saving.finished.set_result(None)

    def write_in_background(self, saving: Saving, fields: ManifestFields, copied: CopiedChecksum) -> None:
        """As `write`, beside training, once the copies are made."""
        copied.add_done_callback(lambda _: self.background.submit(partial(self.write, saving, fields, copied)))

    def _write_and_commit(self, saving: Saving, fields: ManifestFields, copied: CopiedChecksum) -> str:
        self.failure: Exception | None = None  # this rank's, where its kind matters
        self.count += 1
        pending = commit.pending_checkpoint(self.checkpoint_dir, fields.step, f"{self.nonce}{self.count:04x}")
        begin, write = partial(self._begin, saving, pending), partial(self._write_file, pending, copied)
        finish, leaders = partial(self._commit, saving, pending, fields), self.nodes.leaders
        try:
            with contextlib.ExitStack() as locks:
                if isinstance(self.checkpoint_dir, Local):
                    self.ranks.gather_then_finish(leaders, lambda: begin(locks) + write(), 3, finish)
                else:  # the leader removes what is left of an old checkpoint before any rank writes
                    began = self.ranks.gather_integers(lambda: begin(locks) if self.nodes.is_leader else [0], 1)
                    self.ranks.gather_then_finish(leaders, lambda: began[0] + write(), 3, finish)
        except FullshardError:
            lease_lost, not_finite = isinstance(self.failure, LeaseLostError), isinstance(self.failure, NotFiniteError)
            if self.nodes.is_leader and not lease_lost:
                attempt(lambda: commit.abandon(pending))
            flags = self.ranks.gather([lease_lost, not_finite])
            saving.lease_lost, saving.not_finite = (any(of_rank) for of_rank in zip(*flags, strict=True))
            raise
        return str(pending.target)

    def _begin(self, saving: Saving, pending: commit.PendingCheckpoint, locks: contextlib.ExitStack) -> list[int]:
        """Check lease and space, then create the staging directory. Returns the time in milliseconds since 1970; the
        manifest gets the first rank's."""
        now = round(time.time() * 1000)
        self._check_lease()
        if not saving.overwrites and not isinstance(self.checkpoint_dir, Local) and commit.is_checkpoint(pending.target):
            raise FullshardError(another_state(pending.target))  # an object store has no staging directory
        refuse_full(self.checkpoint_dir, self.staging.shards.node_bytes + HEADERS, "its files", pending.partial)
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
        if not self.staging.shards.layout.items:
            return [0, 0]
        try:
            return checksum_to_ints(self.staging.write(pending.partial, checksum))
        except NotFiniteError as error:
            self.failure = error
            raise
        except OSError as error:
            raise FullshardError(f"{pending.partial}: {error.strerror or error}") from None

    def _commit(
        self, saving: Saving, pending: commit.PendingCheckpoint, fields: ManifestFields, results: list[list[int]]
    ) -> None:
        """Write the manifest and make the checkpoint visible. `results`: time and checksum of each rank. Without a shared
        disk each node has its own manifest, which names the copies on its own disk."""
        shards = self.staging.shards
        self._check_lease()
        files = file_records(shards.files, [ints_to_checksum(ints) for _, *ints in results], self.nodes.of_file)
        if not saving.overwrites and commit.is_checkpoint(pending.target):
            read, old = attempt(partial(commit.read_manifest, pending.target))
            if not read or old.files != files:
                raise FullshardError(another_state(pending.target))
        manifest = make_manifest(shards.records, files, fields, results[0][0] / 1000)
        try:
            commit.commit(pending, manifest.to_bytes(shards.texts))
        except OSError as error:
            raise FullshardError(f"{pending.target}: {error.strerror or error}") from None

    def _prune(self, saving: Saving, fields: ManifestFields) -> None:
        """Delete the checkpoints that retention lets go, on each node's leader. An error here does not fail the save."""
        if not (self.keep and self.keep.last and self.nodes.is_leader):
            return
        worked, result = attempt(lambda: self._prune_own(self.keep, fields))
        saving.messages = result if worked else [f"old checkpoints stay in {self.checkpoint_dir}: {result[0]}"]

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
        self.ranks.gather_results(lambda: commit.sweep(self.checkpoint_dir) if self.nodes.is_leader else None)

    def discard(self, step: int) -> None:
        """Remove the checkpoint of a step."""
        name = commit.checkpoint_name(step)

        def remove() -> None:
            self._check_lease()
            commit.remove(self.checkpoint_dir, name)
            if self.inventory:
                self.inventory.forget(name)

        self.ranks.gather_results(lambda: remove() if self.nodes.is_leader else None)

    def names(self) -> list[str]:
        """The checkpoints that this rank sees. Not collective."""
        return commit.committed(self.checkpoint_dir)

    def refuse_no_space(self, count: int) -> None:
        """Raise if there is no space for `count` checkpoints, counting those that are there."""
        size = self.state_bytes() // self.nodes.count + HEADERS
        missing = max(0, count - len(self.names())) * size
        what = f"{count} checkpoints of {bytes_text(size)}"
        self.ranks.gather_results(lambda: refuse_full(self.checkpoint_dir, missing, what) if self.nodes.is_leader else None)

    def newest(self, below: float = math.inf, *, contents: bool = True) -> tuple[Place | None, list[str]]:
        """The newest undamaged checkpoint of a step below `below`, and a sentence about each damaged one that is newer. Without
        `contents`, the checksums of its files are left to the caller."""
        listings = list_on_nodes(self.checkpoint_dir, self.ranks, self.nodes)
        damaged: list[str] = []
        for name in listings.names():
            if (commit.step_of(name) or 0) >= below:
                continue
            place = self.checkpoint_dir.child(name)
            if lacking := listings.lacking(name):
                damaged.append(f"{place} is not on {listed(lacking)}")
                continue
            wrong = find_damage(place, self.ranks, self.nodes, contents=contents)
            if not wrong:
                self.verified |= {name} if contents else set()
                return place, damaged
            damaged.append(wrong[0])
        return None, damaged

    def tell_nodes(self) -> str | None:
        """A sentence on who keeps what, where machines do not share the directory. Collective."""
        if self.nodes.count == 1:
            return None
        hosts = list_on_nodes(self.checkpoint_dir, self.ranks, self.nodes).hosts
        return (
            f"{self.checkpoint_dir} is not shared: {listed(hosts)} each keep their own part of every checkpoint, and a resume "
            "needs all of them"
        )


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
