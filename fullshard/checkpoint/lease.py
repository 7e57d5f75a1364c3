"""Leases: at most one process at a time writes to a directory of checkpoints and deletes from it.

A lease is a small file in the directory, `.lease-000001`, that its holder renews. A process that finds one waits: if the
holder is a process of this machine that has ended, the lease is stale at once; if it is renewed meanwhile, it is valid; if
it stays unchanged for long, it is stale. A stale lease is broken by creating the next number, which only one process can.
The holder of the highest number owns the directory. A holder that was suspended finds a higher number, or its own lease
gone, and writes no more. Clocks need not agree. Works for local directories and object stores.
"""

import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from fullshard.base.errors import FullshardError
from fullshard.checkpoint.directories import Local, Place

RENEWAL = 20.0  # seconds between renewals
STALE = 180.0  # seconds: a lease that does not change for as long is stale
WATCHED = 3 * RENEWAL  # seconds: the same for a lease that is older than STALE by this machine's clock
DYING = 10.0  # seconds that a process of this machine may take to end
_SIZE = 2048  # bytes of a record, always the same: it is renewed in place
_NAME = re.compile(r"\.lease-(\d{6,12})")


class LeaseLostError(FullshardError):
    """Another process has taken over the directory."""

    exit_code = 1


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease. `started`, `boot` and `namespace` distinguish it from others of the same pid.
    `renewed`: seconds since 1970, by the holder's clock."""

    id: str
    host: str
    pid: int
    started: str
    boot: str
    namespace: str
    run: str
    renewed: float

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(_SIZE - 1) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> "Holder | None":
        """The inverse of `to_bytes`; None if the data is not a record."""
        try:
            tree = json.loads(data)
            holder = cls(**{f.name: tree[f.name] for f in fields(cls)})
            texts = all(isinstance(v, str) for k, v in asdict(holder).items() if k not in ("pid", "renewed"))
            return holder if texts and isinstance(holder.pid, int) and isinstance(holder.renewed, int | float) else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" ({self.run})" if self.run else "")


Leases = dict[int, tuple[bytes, Holder | None]]  # number: the file's bytes, and the holder if they can be parsed


def read_leases(checkpoint_dir: Place) -> Leases:
    """All leases in a directory, stale ones too."""
    leases: Leases = {}
    for name, size in checkpoint_dir.files().items():
        if match := _NAME.fullmatch(name):
            text = bytearray(min(size, _SIZE))
            try:
                checkpoint_dir.read(name, [(0, memoryview(text))])
            except FileNotFoundError:
                continue
            except EOFError:
                text.clear()
            leases[int(match[1])] = bytes(text), Holder.from_bytes(bytes(text))
    return leases


# -- processes of this machine ------------------------------------------------------------------------------


def _this_process(run: str) -> Holder:
    pid, host = os.getpid(), socket.gethostname()[:64]
    return Holder(secrets.token_hex(8), host, pid, _started(pid), _boot(), _namespace(), run[-100:], time.time())


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; empty if it does not exist or is a zombie."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if after_name[0] in "ZX" else after_name[19]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(8)  # unknown: no holder will count as one of this machine


def _namespace() -> str:
    """The namespace of this process's pid: containers on one machine have different ones."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_local(holder: Holder) -> bool:
    return (holder.boot, holder.namespace) == (_boot(), _namespace())


def _is_dead(holder: Holder) -> bool:
    """Whether the holder is known to be gone: a process of this machine that has ended, or this one after `release`."""
    if not _is_local(holder):
        return False
    released = holder.pid == os.getpid() and holder.id not in {lease.holder.id for lease in _leases.values()}
    return released or _started(holder.pid) != holder.started


# -- taking -------------------------------------------------------------------------------------------------


class Lease:
    """A lease that this process holds until `release`. A thread renews it. `users` counts the parts of the process that
    share it; `lost` says to whom it was lost, if it was."""

    def __init__(self, checkpoint_dir: Place, number: int, holder: Holder):
        self.checkpoint_dir, self.number, self.holder = checkpoint_dir, number, holder
        self.users, self.lost, self.ended = 1, "", threading.Event()
        threading.Thread(target=self._keep_renewing, daemon=True, name="checkpoint-lease").start()

    @property
    def name(self) -> str:
        return lease_name(self.number)

    def check(self) -> None:
        """Raise LeaseLostError if another process has taken the directory."""
        if not self.lost and self._is_taken() and not self._recovers():
            others = [h for n, (_, h) in sorted(read_leases(self.checkpoint_dir).items()) if n != self.number and h]
            self.lost = f"by {others[-1]}" if others else "by a process that has ended"
        if self.lost:
            raise LeaseLostError(
                f"{self.checkpoint_dir} was taken over {self.lost} while this process was suspended; it writes and deletes "
                "nothing more there"
            )

    def _is_taken(self) -> bool:
        numbers = [int(m[1]) for name in self.checkpoint_dir.files() if (m := _NAME.fullmatch(name))]
        return self.number not in numbers or max(numbers) > self.number

    def _recovers(self) -> bool:
        """Whether the lease is valid after all: the other process has given way (see `_is_first`), or the directory was
        removed and the lease can be created again."""
        if isinstance(self.checkpoint_dir, Local) and not self.checkpoint_dir.path.exists():
            return self.checkpoint_dir.create(self.name, self.holder.to_bytes())
        time.sleep(0.5)
        return not self._is_taken()

    def _keep_renewing(self) -> None:
        while not self.ended.wait(RENEWAL):
            with suppress(Exception):  # a full disk or no network: the next renewal may work
                self.check()
                self.holder = replace(self.holder, renewed=time.time())
                self.checkpoint_dir.rewrite(self.name, self.holder.to_bytes())
            if self.lost:
                return

    def release(self) -> None:
        """End one use. The last one removes the lease."""
        self.users -= 1
        if self.users > 0:
            return
        self.ended.set()
        _leases.pop(_key(self.checkpoint_dir), None)
        with suppress(Exception):
            if not self._is_taken():
                self.checkpoint_dir.remove_file(self.name)


_leases: dict[str, Lease] = {}  # of this process, by directory: its parts share a lease


def _key(checkpoint_dir: Place) -> str:
    where = checkpoint_dir.path.resolve() if isinstance(checkpoint_dir, Local) else checkpoint_dir
    return f"{os.getpid()} {where}"


def lease_name(number: int) -> str:
    return f".lease-{number:06d}"


def take_lease(checkpoint_dir: Place, run: str = "") -> Lease:
    """Take the lease of a directory, which is created if needed. Waits while the holder of another lease may be dead, and
    raises if it is alive. `run` names this process to others."""
    if lease := _leases.get(_key(checkpoint_dir)):
        lease.users += 1
        return lease
    try:
        if isinstance(checkpoint_dir, Local):
            os.makedirs(checkpoint_dir.path, exist_ok=True)
        watch = _Watch(checkpoint_dir)
        while True:
            leases = read_leases(checkpoint_dir)
            if watch.stale(leases) and (lease := _break(checkpoint_dir, leases, _this_process(run))):
                return lease
            time.sleep(0.2)
    except OSError as error:
        raise FullshardError(f"cannot write to {checkpoint_dir}: {error.strerror or error}") from None


def _break(checkpoint_dir: Place, stale: Leases, holder: Holder) -> Lease | None:
    """Create the lease after the stale ones and remove those. None if another process was quicker."""
    number = max(stale, default=0) + 1
    if not checkpoint_dir.create(lease_name(number), holder.to_bytes()) or not _is_first(checkpoint_dir, number, stale):
        return None
    for old in stale:
        checkpoint_dir.remove_file(lease_name(old))
    _leases[_key(checkpoint_dir)] = lease = Lease(checkpoint_dir, number, holder)
    return lease


def _is_first(checkpoint_dir: Place, number: int, stale: Leases) -> bool:
    """Whether the other leases are still the stale ones that were read before the new lease was created. If not, this
    process was suspended in between and gives way: it removes the new lease."""
    others = {n: text for n, (text, _) in read_leases(checkpoint_dir).items() if n != number}
    if all(n in stale and stale[n][0] == text for n, text in others.items()) and others.keys() == stale.keys():
        return True
    checkpoint_dir.remove_file(lease_name(number))
    return False


class _Watch:
    """The leases that a waiting process has seen so far, and since when they are the same."""

    def __init__(self, checkpoint_dir: Place):
        self.checkpoint_dir, self.since, self.reported = checkpoint_dir, time.monotonic(), False
        self.seen: Leases | None = None

    def stale(self, leases: Leases) -> bool:
        """Whether all leases are stale. Raises if one is valid; False if that is not known yet."""
        alive = {n: (text, h) for n, (text, h) in leases.items() if h is None or not _is_dead(h)}
        if not alive:
            return True
        text, holder = alive[max(alive)]
        now = time.monotonic()
        if self.seen is None or alive.keys() != self.seen.keys():
            self.seen, self.since = alive, now
        watched, old = now - self.since, holder is None or time.time() - holder.renewed > STALE
        renewed = text != self.seen[max(alive)][0]
        if renewed or (holder and _is_local(holder) and not old and watched > DYING):
            raise FullshardError(f"{self.checkpoint_dir} is written to by {holder}; end that, or write another checkpoint.path")
        if watched > DYING:
            self._report(holder)
        return watched > STALE or (old and watched > WATCHED)

    def _report(self, holder: Holder | None) -> None:
        if not self.reported:
            who = holder or "an unknown process"
            text = f"{self.checkpoint_dir} was last written to by {who}: waiting up to {STALE:.0f} s to see whether it is alive"
            print(text, file=sys.stderr, flush=True)
            self.reported = True
