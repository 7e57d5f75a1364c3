"""Checkpoints of a sharded state: each rank writes its own part, nothing is gathered, and all agree on the end.

A save has two halves. Staging copies this rank's items into an arena, after which training may go on. Writing is done by
a background thread: each rank writes its file into the staging directory, the first (of each node, without a shared
disk) hears of all checksums and commits, all learn how it went.
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
from fullshard.checkpoint.retention import Candidate, Kept
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
from fullshard.on_torch.saving import state_tensors
from fullshard.on_torch.saving.background import Background
from fullshard.on_torch.saving.dcp_storage import About, file_records, make_manifest
from fullshard.on_torch.saving.nodes import find_nodes
from fullshard.on_torch.saving.restore import damage
from fullshard.on_torch.saving.staging import Copying, NotFiniteError, Staging
from fullshard.on_torch.state import State
from fullshard.text import bytes_text

Copied = Future[str | None]  # the copies of a save, and their checksum where it was made on the way
HEADERS = 1 << 20  # bytes: what a checkpoint takes besides its tensors, about


@dataclasses.dataclass
class Saving:
    """A save under way. `result` waits for it: where the checkpoint lies. It raises what went wrong, on all ranks alike."""

    step: int
    copying: Copying
    finished: Future[None] = dataclasses.field(default_factory=Future)
    where: str = ""
    error: str | None = None
    note: str = ""  # what is to be said about it, if anything
    retires: bool = True  # whether older ones may go for it
    poisoned: bool = False  # whether it failed because a weight was not finite,
    lost: bool = False  # or because another process has the shelf
    passed: list[str] = dataclasses.field(default_factory=list)  # what retention says of others

    def staged(self) -> None:
        """Wait until the state may change, by whatever means."""
        self.copying.over.wait()

    def done(self) -> bool:
        return self.finished.done()

    def result(self) -> str:
        self.finished.result()
        if self.error is not None:
            raise FullshardError(self.error)
        return self.where


class Checkpointer:
    """Saves a state to one shelf, again and again. Making one is collective, and so are all its verbs.

    At most one save is in flight: the next waits for it. With `overlap`, tensors are copied while the next forward and
    backward run, and the optimizer's step waits for that; who changes weights in another way waits for `staged` first.
    Where the copies would take more host memory than `room`, or than there is, `save` returns when all is written.

    It holds the shelf's lease until `close`: nobody else writes there or deletes. `run`: what others are told of the holder.
    """

    def __init__(
        self,
        shelf: str | Path,
        state: State,
        *,
        keep: Kept | None = None,
        overlap: bool = False,
        room: int | None = None,
        run: str = "",
    ):
        self.shelf, self.state, self.keep = open_place(shelf), state, keep
        self.inventory: Inventory | None = None  # what retention knows, once it has looked
        self.verified: set[str] = set()  # checkpoints that were compared with their checksums before that
        self.group = acquire_group()
        self.nodes = find_nodes(self.shelf, self.group)
        self.lease: Lease | None = None  # of the shelf, where this rank leads
        self._take_lease(run)
        self.nonce, self.count = decide(self.group, commit.new_nonce), 0  # of all saves, and how many there were
        self.plan = state.plan.to_dict()
        self.staging = Staging(state, self.group, self.nodes, overlap=overlap, room=room)
        self.background = Background("checkpoint", patience="idle" if overlap and state.device.type == "cpu" else "none")
        self.saving: Saving | None = None
        held = self.staging.overlap and state.optimizer is not None
        self.hook = state.optimizer.register_step_pre_hook(lambda *_: self.staging.hold_update()) if held else None  # type: ignore[union-attr]

    def save(
        self,
        *,
        cursor: int | None = None,
        recipe: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        overwrite: bool = True,
        retire: bool = True,
    ) -> Saving:
        """Stage the state as it is now and start to write it. `overwrite`: in the place of another state of the same step,
        if the shelf has one. `retire`: older checkpoints may go for it."""
        self.wait()
        self.overwrite = overwrite
        state, staging = self.state, self.staging
        with torch.no_grad(), state.values(at_rest=True) as values:
            held = state_tensors.all_slots(state, values)
            numbers = state_tensors.numbers_of(state, held) | {"extra": extra or {}}
            about = About(state.step, cursor, self.plan, recipe, numbers, metrics or {})
            self.count += 1
            self.saving = saving = Saving(state.step, staging.start(values, held), note=staging.why, retires=retire)
            if staging.in_place:  # inside: the values stay as they are until they are written
                self._write(saving, about, staging.worker.submit(saving.copying.finish))
        if staging.in_place or state.tiers:
            staging.forget()
        if not staging.in_place:
            copied = staging.worker.submit(saving.copying.finish)
            copied.add_done_callback(lambda _: self.background.submit(partial(self._write, saving, about, copied)))
        return saving

    def wait(self) -> None:
        """Until no save is in flight; what became of it is in its `Saving`."""
        if self.saving:
            self.saving.finished.result()

    def close(self) -> None:
        """Give back what a save holds: the arena above all, which is as large as this rank's part of the state."""
        self.wait()
        if self.hook:
            self.hook.remove()
        self.background.close()
        self.staging.close()
        self.release()
        release_group(self.group)

    def release(self) -> None:
        """Give the shelf's lease up, by itself where ranks are gone and `close` cannot be called. Not collective."""
        if self.lease:
            self.lease.release()
            self.lease = None

    def agree(self, flag: bool) -> bool:
        """Whether any rank raised it."""
        return any(gather(self.group, flag))

    def _take_lease(self, run: str) -> None:
        def take() -> list[int]:
            self.lease = take_lease(self.shelf, run) if self.nodes.leads else None
            return []

        try:
            gather_integers(self.group, take, 0)
        except FullshardError:
            self.release()
            release_group(self.group)
            raise

    # -- writing ---------------------------------------------------------------------------------------

    def _write(self, saving: Saving, about: About, copied: Copied) -> None:
        """In the background. Whatever goes wrong becomes the saving's error, the same sentence on all ranks."""
        try:
            saving.where = self._write_and_commit(saving, about, copied)
            if saving.retires:
                self._retire(saving, about)
        except FullshardError as error:
            saving.error = f"the checkpoint of step {saving.step} was not saved: {error}"
        except Exception as error:  # a rank is gone: training will find out by itself
            saving.error = f"the checkpoint of step {saving.step} was not saved: {type(error).__name__}: {error}"
        finally:
            saving.finished.set_result(None)

    def _write_and_commit(self, saving: Saving, about: About, copied: Copied) -> str:
        self.fault: Exception | None = None
        made = commit.draft(self.shelf, about.step, f"{self.nonce}{self.count:04x}")
        write, finish = partial(self._write_file, made, copied), partial(self._commit, made, about)
        try:
            with contextlib.ExitStack() as held:
                if isinstance(self.shelf, Local):
                    gather_then_finish(self.group, self.nodes.leaders, lambda: self._begin(held, made) + write(), 3, finish)
                else:  # what is there of an old checkpoint goes before anybody writes
                    began = gather_integers(self.group, lambda: self._begin(held, made) if self.nodes.leads else [0], 1)
                    gather_then_finish(self.group, self.nodes.leaders, lambda: began[0] + write(), 3, finish)
        except FullshardError:
            lost, poisoned = isinstance(self.fault, LeaseLostError), isinstance(self.fault, NotFiniteError)
            if self.nodes.leads and not lost:
                attempt(lambda: commit.abandon(made))
            for of_rank in gather(self.group, (lost, poisoned)):
                saving.lost, saving.poisoned = saving.lost or of_rank[0], saving.poisoned or of_rank[1]
            raise
        return str(made.target)

    def _begin(self, held: contextlib.ExitStack, made: commit.Draft) -> list[int]:
        """Milliseconds since 1970: the first rank's count."""
        now = round(time.time() * 1000)
        self._check_lease()
        if not self.overwrite and not isinstance(self.shelf, Local) and commit.is_checkpoint(made.target):
            raise FullshardError(exists(made.target))  # an object store has no place beside it
        refuse_full(self.shelf, self.staging.size_here + HEADERS, "its files", made.staging)
        held.enter_context(commit.begin(made))
        return [now]

    def _check_lease(self) -> None:
        try:
            if self.lease:
                self.lease.check()
        except LeaseLostError as error:
            self.fault = error
            raise

    def _write_file(self, made: commit.Draft, copied: Copied) -> list[int]:
        """The file's checksum, in halves."""
        known = copied.result()
        if not self.staging.layout.items:
            return [0, 0]
        try:
            return halves(self.staging.write(made.staging, known))
        except NotFiniteError as error:
            self.fault = error
            raise
        except OSError as error:
            raise FullshardError(f"{made.staging}: {error.strerror or error}") from None

    def _commit(self, made: commit.Draft, about: About, told: list[list[int]]) -> None:
        """With disks of their own, nodes have manifests of their own: each prefers the copies that it has."""
        staging = self.staging
        self._check_lease()
        files = file_records(staging.parts, [whole(sums) for _, *sums in told], self.nodes.of_files)
        if not self.overwrite and commit.is_checkpoint(made.target):
            read, old = attempt(partial(commit.read_manifest, made.target))
            if not read or old.files != files:
                raise FullshardError(exists(made.target))
        text = make_manifest(staging.records, files, about, told[0][0] / 1000).to_bytes(staging.texts)
        try:
            commit.commit(made, text)
        except OSError as error:
            raise FullshardError(f"{made.target}: {error.strerror or error}") from None

    def _retire(self, saving: Saving, about: About) -> None:
        """Remove the checkpoints that need not stay; each node's first rank its own. What goes wrong costs no checkpoint."""
        if not (self.keep and self.keep.last and self.nodes.leads):
            return
        worked, found = attempt(lambda: self._retire_here(about))
        saving.passed = found if worked else [f"old checkpoints stay in {self.shelf}: {found}"]

    def _retire_here(self, about: About) -> list[str]:
        """Sentences about checkpoints that do not count."""
        assert self.keep is not None
        said = set(self.inventory.damaged) if self.inventory else set()
        if self.inventory is None:
            self.inventory = Inventory.of(self.shelf)
            self.inventory.verified |= self.verified
        known = self.inventory
        known.add(Candidate(about.step, time.time(), about.metrics))
        for name in known.retire(self.keep):
            self._check_lease()
            if attempt(partial(commit.remove, self.shelf, name))[0] or not commit.is_checkpoint(self.shelf.child(name)):
                known.forget(name)
        fresh = {n: why for n, why in known.damaged.items() if n not in said}
        return [f"{n} stays and does not count: {why}" for n, why in fresh.items() if commit.is_checkpoint(self.shelf.child(n))]

    # -- the shelf -------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove what killed runs left on the shelf."""
        gather_results(self.group, lambda: commit.sweep(self.shelf) if self.nodes.leads else None)

    def discard(self, step: int) -> None:
        """Remove the checkpoint of a step."""
        name = commit.checkpoint_name(step)

        def remove() -> None:
            self._check_lease()
            commit.remove(self.shelf, name)
            if self.inventory:
                self.inventory.forget(name)

        gather_results(self.group, lambda: remove() if self.nodes.leads else None)

    def names(self) -> list[str]:
        """The checkpoints that this rank sees."""
        return commit.committed(self.shelf)

    def refuse_small(self, count: int) -> None:
        """Raise where the shelf has no room for `count` checkpoints, those that are there included."""
        size = state_tensors.needed_bytes(self.state) // self.nodes.count + HEADERS
        missing = max(0, count - len(self.names())) * size
        what = f"{count} checkpoints of {bytes_text(size)}"
        gather_results(self.group, lambda: refuse_full(self.shelf, missing, what) if self.nodes.leads else None)

    def newest(self, below: float = math.inf) -> tuple[Place | None, list[str]]:
        """The newest checkpoint that is whole, of a step below `below`, and sentences about those that are not whole."""
        everywhere = gather(self.group, commit.committed(self.shelf) if self.nodes.leads else None)
        names = [n for n in everywhere[0] if all(n in found for found in everywhere if found is not None)]
        said: list[str] = []
        for name in reversed([n for n in names if (commit.step_of(n) or 0) < below]):
            wrong = damage(self.shelf.child(name), self.group, self.nodes)
            if not wrong:
                self.verified.add(name)
                return self.shelf.child(name), said
            said.append(wrong[0])
        return None, said


def exists(target: Place) -> str:
    return (
        f"{target} holds another state already; let the steps be counted (state.optimizer = the one that you step), save to "
        "another directory, or pass overwrite=True"
    )


def halves(checksum: str) -> list[int]:
    """128 bits as two signed numbers of 64, which is what travels in a tensor."""
    data = bytes.fromhex(checksum)
    return [int.from_bytes(half, "big", signed=True) for half in (data[:8], data[8:])]


def whole(numbers: Sequence[int]) -> str:
    """What `halves` cut."""
    return b"".join(half.to_bytes(8, "big", signed=True) for half in numbers).hex()


def refuse_full(shelf: Place, needed: int, what: str, begun: Place | None = None) -> None:
    """`begun`: where some of it may lie already."""
    free = shelf.free()
    if free is not None and free < needed and begun is not None:
        free += sum(begun.files().values())
    if free is not None and free < needed:
        raise FullshardError(
            f"{shelf} has {bytes_text(free)} free, but {what} take {bytes_text(needed)}; make room, or keep fewer"
        )


def save_checkpoint(shelf: str | Path, state: State, *, overwrite: bool = False, **about: Any) -> str:
    """One checkpoint, whole and durable when this returns; where it lies. Collective."""
    if state.optimizer is None and any(p.requires_grad for p in state.parameters()) and torch.distributed.get_rank() == 0:
        warnings.warn(
            f"this state has no optimizer: the checkpoint of step {state.step} holds weights only, and steps are not counted; "
            "if you train it with an optimizer of your own, write state.optimizer = yours first",
            stacklevel=4,
        )
    checkpointer = Checkpointer(shelf, state)
    try:
        return checkpointer.save(overwrite=overwrite, **about).result()
    finally:
        checkpointer.close()
