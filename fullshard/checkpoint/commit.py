"""Makes checkpoints appear and disappear atomically, finds them, and removes what killed writers left behind.

A `checkpoint_dir` is a directory of checkpoints, named `step-00000100` and so on. On a filesystem a checkpoint is written to a
partial directory beside its target, synced, and renamed. An object store has no rename: there the manifest is written last,
and a directory without a manifest is not a checkpoint. Readers therefore see complete checkpoints only. What a killed
writer leaves is garbage that `sweep` removes.
"""

import ctypes
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullshard.base.errors import FullshardError
from fullshard.checkpoint import file_writer
from fullshard.checkpoint.directories import Local, Place, open_place
from fullshard.checkpoint.manifest import LARGEST, MANIFEST, Manifest

_NAME = re.compile(r"step-(\d{8,})")
_STAGED = re.compile(r"\.step-\d{8,}\.[0-9a-f]+\.(partial|removed)")
_PARTIAL = re.compile(r"\.((recipe|plan|run)\.json|(metrics|samples)\.jsonl|export\.[0-9a-f]+)\.partial")  # in a run's directory
_LEASE = re.compile(r"\.lease-\d{6,}\.[0-9a-f]+\.partial")
PROBE = ".probe-"  # prefix of the files by which ranks find out who shares a disk
_RENAME_EXCHANGE = 2  # of renameat2
_AT_FDCWD = -100


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


# -- writing ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written: its files go to `partial`, and appear at `target` on commit."""

    partial: Place
    target: Place


def pending_checkpoint(checkpoint_dir: Place, step: int, nonce: str) -> PendingCheckpoint:
    """The paths of a checkpoint to be written; the same on every rank for the same nonce. Creates nothing."""
    name = checkpoint_name(step)
    partial = (
        checkpoint_dir.child(f".{name}.{nonce}.partial") if isinstance(checkpoint_dir, Local) else checkpoint_dir.child(name)
    )
    return PendingCheckpoint(partial, checkpoint_dir.child(name))


def new_nonce() -> str:
    """Digits that tell attempts at one checkpoint apart."""
    return secrets.token_hex(4)


@contextmanager
def begin(pending: PendingCheckpoint) -> Iterator[None]:
    """Create the partial directory, and lock it against `sweep` while the context lasts.

    On a filesystem every writer calls this, in any order. On an object store one does, before the others write: it removes
    an old checkpoint of the same step.
    """
    if not isinstance(pending.partial, Local):
        pending.partial.remove_file(MANIFEST)  # first: no reader may see an old manifest with new files
        pending.partial.remove()
        yield
        return
    path = os.fspath(pending.partial.path)
    try:
        os.mkdir(path)
    except FileExistsError:
        pass
    except FileNotFoundError:
        os.makedirs(path, exist_ok=True)
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        os.close(file)


def commit(pending: PendingCheckpoint, manifest: bytes) -> None:
    """Write the manifest and make the checkpoint visible. All other files must be written and durable."""
    pending.partial.write(MANIFEST, manifest)
    if not (isinstance(pending.partial, Local) and isinstance(pending.target, Local)):
        return
    file_writer.sync_directory(pending.partial.path)
    try:
        os.rename(pending.partial.path, pending.target.path)
    except OSError:
        if not pending.target.path.exists():
            raise
        _replace(pending.partial.path, pending.target.path)
    file_writer.sync_directory(pending.target.path.parent)


def _replace(new: Path, old: Path) -> None:
    """Rename `new` to `old` and delete what was there. Where the kernel supports it, the name `old` always exists."""
    libc = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(libc, "renameat2", None)
    aside = old.with_name(f".{old.name}.{new_nonce()}.removed")
    if exchange and exchange(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        os.rename(new, aside)
    else:
        os.rename(old, aside)
        os.rename(new, old)
    Local(aside).remove()


def abandon(pending: PendingCheckpoint) -> None:
    """Delete the files of a checkpoint that will not be committed."""
    pending.partial.remove()


def remove(checkpoint_dir: Place, name: str) -> None:
    """Make a checkpoint invisible at once, then delete it."""
    place = checkpoint_dir.child(name)
    if isinstance(place, Local):
        aside = place.path.with_name(f".{name}.{new_nonce()}.removed")
        os.rename(place.path, aside)
        Local(aside).remove()
    else:
        place.remove_file(MANIFEST)
        place.remove()


# -- finding ------------------------------------------------------------------------------------------------


def committed(checkpoint_dir: Place) -> list[str]:
    """The names of the checkpoints in a directory, oldest step first."""
    named = [n for n in checkpoint_dir.directories() if step_of(n) is not None and MANIFEST in checkpoint_dir.child(n).files()]
    return sorted(named, key=lambda n: step_of(n) or 0)


def read_manifest(place: Place) -> Manifest:
    try:
        data = place.read_whole(MANIFEST, LARGEST)
    except (FileNotFoundError, EOFError):
        raise FullshardError(f"{place} is not a checkpoint: it has no {MANIFEST}") from None
    return Manifest.from_bytes(data, f"{place}/{MANIFEST}")


def is_checkpoint(place: Place) -> bool:
    return MANIFEST in place.files()


def find(where: str | Path) -> Place:
    """The checkpoint at `where`, which is a checkpoint, a directory of them or a run. Of several, the newest."""
    place = open_place(where)
    if is_checkpoint(place):
        return place
    for checkpoint_dir in (place, place.child("checkpoints")):
        if names := committed(checkpoint_dir):
            return checkpoint_dir.child(names[-1])
    raise FullshardError(f"{where} is neither a checkpoint nor a directory of checkpoints")


def find_checkpoint_dir(where: str | Path) -> Place:
    """The directory of checkpoints at `where`, which is such a directory or a run."""
    place = open_place(where)
    return place.child("checkpoints") if "checkpoints" in place.directories() else place


# -- garbage ------------------------------------------------------------------------------------------------


def garbage(checkpoint_dir: Place) -> tuple[list[str], list[str]]:
    """Names of unfinished files and directories: those that killed writers left, and those that a live process has locked."""
    candidates = [n for n in checkpoint_dir.directories() if _is_garbage(checkpoint_dir, n)]
    candidates += [n for n in checkpoint_dir.files() if n.startswith(PROBE) or _LEASE.fullmatch(n)]
    locked = [n for n in candidates if isinstance(checkpoint_dir, Local) and is_locked(checkpoint_dir.path / n)]
    return [n for n in candidates if n not in locked], locked


def _is_garbage(checkpoint_dir: Place, name: str) -> bool:
    if isinstance(checkpoint_dir, Local) and _STAGED.fullmatch(name):
        return True
    return step_of(name) is not None and MANIFEST not in checkpoint_dir.child(name).files()


def partial_files(run: Place) -> list[str]:
    """Names of the unfinished files and exports that a killed process left in a run's own directory."""
    return [n for n in [*run.files(), *run.directories()] if _PARTIAL.fullmatch(n)]


def is_locked(path: Path) -> bool:
    """Whether a live process has locked this directory or file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def sweep(checkpoint_dir: Place) -> list[str]:
    """Delete what killed writers left, unfinished uploads too; return the names."""
    names, _ = garbage(checkpoint_dir)
    for name in names:
        remove_leftover(checkpoint_dir, name)
    for upload in checkpoint_dir.uploads():
        checkpoint_dir.abort(upload)
    return names


def remove_leftover(directory: Place, name: str) -> None:
    """Delete a file or directory."""
    directory.remove_file(name) if name in directory.files() else directory.child(name).remove()


def sweep_run(run: Place) -> list[str]:
    """Delete the unfinished files in a run's directory; return their names. No other process may be writing to it."""
    names = partial_files(run)
    for name in names:
        remove_leftover(run, name)
    return names


@contextmanager
def lock_run(directory: Path, patience: float = 20.0) -> Iterator[None]:
    """Lock a run's directory: two runs in one would mix their metrics. Waits up to `patience` seconds for another process
    that is ending. The kernel releases the lock when a process is killed."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FullshardError(f"another process trains into {directory}; end it, or give another --run") from None
                time.sleep(0.2)
        yield
    finally:
        os.close(file)
