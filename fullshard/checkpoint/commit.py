"""How a checkpoint comes into being and goes: all of it at once, or not at all.

A shelf is a directory of checkpoints, `step-00000100` and so on. On a filesystem each is staged beside its target
and renamed when it is whole and synced. An object store has no rename; there the manifest is put last, and what
has no manifest is no checkpoint. Readers therefore see whole checkpoints or none, and whatever a killed writer
left behind is garbage that `sweep` finds.
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

from fullshard.checkpoint import file_writer
from fullshard.checkpoint.manifest import LARGEST, MANIFEST, Manifest
from fullshard.checkpoint.place import Local, Place, open_place
from fullshard.errors import FullshardError

_NAME = re.compile(r"step-(\d{8,})")
_STAGED = re.compile(r"\.step-\d{8,}\.[0-9a-f]+\.(partial|removed)")
_HALF = re.compile(r"\.(recipe\.json|plan\.json|(metrics|samples)\.jsonl|export\.[0-9a-f]+)\.partial")  # in a run's directory
_LEASE = re.compile(r"\.lease-\d{6,}\.[0-9a-f]+\.partial")
PROBE = ".probe-"  # files by which ranks find out who shares a disk
_EXCHANGE = 2  # renameat2's RENAME_EXCHANGE
_HERE = -100  # AT_FDCWD


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


# -- writing ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """A checkpoint under way: `staging` is where its files go, `target` where they will be found."""

    staging: Place
    target: Place


def draft(shelf: Place, step: int, nonce: str) -> Draft:
    """The same on every rank that is told the same nonce. Touches nothing."""
    name = checkpoint_name(step)
    staging = shelf.child(f".{name}.{nonce}.partial") if isinstance(shelf, Local) else shelf.child(name)
    return Draft(staging, shelf.child(name))


def new_nonce() -> str:
    return secrets.token_hex(4)


@contextmanager
def begin(made: Draft) -> Iterator[None]:
    """Make the staging directory, and hold it: `sweep` leaves alone what a live process holds. In a directory each writer
    does so, whoever comes first; in an object store one does, before the others write."""
    if not isinstance(made.staging, Local):
        made.staging.remove_file(MANIFEST)  # first, so that no reader sees an old manifest over new files
        made.staging.remove()
        yield
        return
    path = os.fspath(made.staging.path)
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


def commit(made: Draft, manifest: bytes) -> None:
    """Everything but the manifest is written and durable; after this the checkpoint exists."""
    made.staging.write(MANIFEST, manifest)
    if not (isinstance(made.staging, Local) and isinstance(made.target, Local)):
        return
    file_writer.sync_directory(made.staging.path)
    try:
        os.rename(made.staging.path, made.target.path)
    except OSError:
        if not made.target.path.exists():
            raise
        _replace(made.staging.path, made.target.path)
    file_writer.sync_directory(made.target.path.parent)


def _replace(new: Path, old: Path) -> None:
    """Put `new` in the place of `old`, which is never missing in between where the kernel can exchange names."""
    libc = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(libc, "renameat2", None)
    aside = old.with_name(f".{old.name}.{new_nonce()}.removed")
    if exchange and exchange(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE) == 0:
        os.rename(new, aside)
    else:
        os.rename(old, aside)
        os.rename(new, old)
    Local(aside).remove()


def abandon(made: Draft) -> None:
    """A draft that will not be finished."""
    made.staging.remove()


def remove(shelf: Place, name: str) -> None:
    """Make a checkpoint invisible at once, then delete it."""
    place = shelf.child(name)
    if isinstance(place, Local):
        aside = place.path.with_name(f".{name}.{new_nonce()}.removed")
        os.rename(place.path, aside)
        Local(aside).remove()
    else:
        place.remove_file(MANIFEST)
        place.remove()


# -- finding ------------------------------------------------------------------------------------------------


def committed(shelf: Place) -> list[str]:
    """The names of the checkpoints of a shelf, oldest step first."""
    named = [n for n in shelf.directories() if step_of(n) is not None and MANIFEST in shelf.child(n).files()]
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
    """The checkpoint that a person means: itself, the newest of a shelf, or the newest of a run's shelf."""
    place = open_place(where)
    if is_checkpoint(place):
        return place
    for shelf in (place, place.child("checkpoints")):
        if names := committed(shelf):
            return shelf.child(names[-1])
    raise FullshardError(f"{where} is no checkpoint, and no directory of checkpoints")


def find_shelf(where: str | Path) -> Place:
    """The directory of checkpoints that a person means: itself, or that of a run."""
    place = open_place(where)
    return place.child("checkpoints") if "checkpoints" in place.directories() else place


# -- garbage ------------------------------------------------------------------------------------------------


def garbage(shelf: Place) -> tuple[list[str], list[str]]:
    """What killed writers left: names to sweep, and names that a live process still holds."""
    found = [n for n in shelf.directories() if _is_garbage(shelf, n)]
    found += [n for n in shelf.files() if n.startswith(PROBE) or _LEASE.fullmatch(n)]
    held = [n for n in found if isinstance(shelf, Local) and is_held(shelf.path / n)]
    return [n for n in found if n not in held], held


def _is_garbage(shelf: Place, name: str) -> bool:
    if isinstance(shelf, Local) and _STAGED.fullmatch(name):
        return True
    return step_of(name) is not None and MANIFEST not in shelf.child(name).files()


def half_written(run: Place) -> list[str]:
    """What a kill left in a run's directory itself: files and exports whose whole is not there yet."""
    return [n for n in [*run.files(), *run.directories()] if _HALF.fullmatch(n)]


def is_held(path: Path) -> bool:
    """Whether a live process holds this directory or file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def sweep(shelf: Place) -> list[str]:
    """Delete the garbage; the names that went."""
    dead, _ = garbage(shelf)
    for name in dead:
        sweep_one(shelf, name)
    for upload in shelf.uploads():
        shelf.abort(upload)
    return dead


def sweep_one(shelf: Place, name: str) -> None:
    shelf.remove_file(name) if name in shelf.files() else shelf.child(name).remove()


def sweep_run(run: Place) -> list[str]:
    """Delete what is half written in a run's directory; whoever calls this holds it, or knows that nobody does."""
    dead = half_written(run)
    for name in dead:
        sweep_one(run, name)
    return dead


@contextmanager
def hold_run(directory: Path, patience: float = 20.0) -> Iterator[None]:
    """Hold a run's directory: two runs in one would mix their numbers. Waits for a dying one; the kernel lets go of
    what a killed process held."""
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
