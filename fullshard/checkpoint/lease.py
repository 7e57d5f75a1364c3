"""The lease of a shelf: who may write to it and delete from it. One holder at a time, in a directory or an object store.

A lease is a small file in the shelf, `.lease-000001`, that its holder renews. Whoever finds one either sees that its
holder is dead (a process of this machine that is gone), or watches it: renewed means held, unchanged for long means
stale. A stale lease is broken by creating the next number, which at most one starter can. The holder of the highest
number holds the shelf; one who was suspended finds a higher number, or its own gone, and writes no more.
"""

import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from fullshard.checkpoint.place import Local, Place
from fullshard.errors import FullshardError

RENEWAL = 20.0  # seconds between renewals
WATCHED = 3 * RENEWAL  # an old lease that did not change for so long is stale,
STALE = 180.0  # old being this many seconds, by this machine's clock; whatever the clocks say, as long unchanged is stale
DYING = 10.0  # seconds that a process of this machine may take to end
_SIZE = 2048  # bytes of a record, always: it is renewed in place
_NAME = re.compile(r"\.lease-(\d{6,12})")


class LeaseLostError(FullshardError):
    """Another process holds the shelf now."""

    exit_code = 1


@dataclass(frozen=True)
class Holder:
    """Who holds a lease. `started`, `boot`, `namespace`: what tells a process from another of the same number; `renewed`:
    seconds since 1970, by the holder's clock."""

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
        """None where the text is no record."""
        try:
            tree = json.loads(data)
            found = cls(**{f.name: tree[f.name] for f in fields(cls)})
            sound = all(isinstance(v, str) for k, v in asdict(found).items() if k not in ("pid", "renewed"))
            return found if sound and isinstance(found.pid, int) and isinstance(found.renewed, int | float) else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" ({self.run})" if self.run else "")


Found = dict[int, tuple[bytes, Holder | None]]  # the leases of a shelf by number: their text, and who holds them


def read_leases(shelf: Place) -> Found:
    found: Found = {}
    for name, size in shelf.files().items():
        if match := _NAME.fullmatch(name):
            text = bytearray(min(size, _SIZE))
            try:
                shelf.read(name, [(0, memoryview(text))])
            except FileNotFoundError:
                continue
            except EOFError:
                text.clear()
            found[int(match[1])] = bytes(text), Holder.from_bytes(bytes(text))
    return found


def holder_of(shelf: Place) -> Holder | None:
    """Who holds the shelf now, as far as can be told without waiting: a dead process of this machine does not."""
    found = read_leases(shelf)
    last = found[max(found)][1] if found else None
    return last if last and not _is_dead(last) else None


# -- this process, and others of this machine ---------------------------------------------------------------


def _me(run: str) -> Holder:
    pid, host = os.getpid(), socket.gethostname()[:64]
    return Holder(secrets.token_hex(8), host, pid, _started(pid), _boot(), _namespace(), run[-100:], time.time())


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; empty if it is not there, or a zombie."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if after_name[0] in "ZX" else after_name[19]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return secrets.token_hex(8)  # unknown: then nobody is of this machine


def _namespace() -> str:
    """Process numbers mean something in one namespace alone: two containers have two."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_here(holder: Holder) -> bool:
    return (holder.boot, holder.namespace) == (_boot(), _namespace())


def _is_dead(holder: Holder) -> bool:
    """Whether this machine knows that nobody holds that lease: its process is gone, or is this one and has given it up."""
    if not _is_here(holder):
        return False
    mine = holder.pid == os.getpid() and holder.id not in {lease.me.id for lease in _held.values()}
    return mine or _started(holder.pid) != holder.started


# -- taking -------------------------------------------------------------------------------------------------


class Lease:
    """A lease that this process holds, until `release`. A thread renews it; `check` raises once another has taken it."""

    def __init__(self, shelf: Place, number: int, me: Holder):
        self.shelf, self.number, self.me = shelf, number, me
        self.uses, self.lost, self.ended = 1, "", threading.Event()
        threading.Thread(target=self._renew_on, daemon=True, name="checkpoint-lease").start()

    @property
    def name(self) -> str:
        return lease_name(self.number)

    def check(self) -> None:
        """Raise where another process has the shelf."""
        if not self.lost and self._is_taken() and not self._comes_back():
            others = [h for n, (_, h) in sorted(read_leases(self.shelf).items()) if n != self.number and h]
            self.lost = f"by {others[-1]}" if others else "by a process that has ended"
        if self.lost:
            raise LeaseLostError(
                f"{self.shelf} was taken over {self.lost} while this one stood still; nothing more is written or deleted there"
            )

    def _is_taken(self) -> bool:
        numbers = [int(m[1]) for name in self.shelf.files() if (m := _NAME.fullmatch(name))]
        return self.number not in numbers or max(numbers) > self.number

    def _comes_back(self) -> bool:
        """Whether it was a starter that came too late and went again, or somebody removed the whole directory."""
        if isinstance(self.shelf, Local) and not self.shelf.path.exists():
            return self.shelf.create(self.name, self.me.to_bytes())
        time.sleep(0.5)
        return not self._is_taken()

    def _renew_on(self) -> None:
        while not self.ended.wait(RENEWAL):
            with suppress(Exception):  # a full disk, a network that is down: the next renewal may work
                self.check()
                self.me = replace(self.me, renewed=time.time())
                self.shelf.rewrite(self.name, self.me.to_bytes())
            if self.lost:
                return

    def release(self) -> None:
        """Give it up, with the last of its users."""
        self.uses -= 1
        if self.uses > 0:
            return
        self.ended.set()
        _held.pop(_key(self.shelf), None)
        with suppress(Exception):
            if not self._is_taken():
                self.shelf.remove_file(self.name)


_held: dict[str, Lease] = {}  # what this process holds: its parts share a lease


def _key(shelf: Place) -> str:
    where = shelf.path.resolve() if isinstance(shelf, Local) else shelf
    return f"{os.getpid()} {where}"


def lease_name(number: int) -> str:
    return f".lease-{number:06d}"


def take_lease(shelf: Place, run: str = "") -> Lease:
    """The lease of a shelf. Waits for a holder that ends, or that may be dead; one that lives is a refusal."""
    if held := _held.get(_key(shelf)):
        held.uses += 1
        return held
    try:
        if isinstance(shelf, Local):
            os.makedirs(shelf.path, exist_ok=True)
        watch = _Watch(shelf)
        while True:
            found = read_leases(shelf)
            if watch.stale(found) and (lease := _break(shelf, found, _me(run))):
                return lease
            time.sleep(0.2)
    except OSError as error:
        raise FullshardError(f"cannot write to {shelf}: {error.strerror or error}") from None


def _break(shelf: Place, found: Found, me: Holder) -> Lease | None:
    """The next lease after those that are stale, unless another starter was quicker."""
    number = max(found, default=0) + 1
    if not shelf.create(lease_name(number), me.to_bytes()) or not _alone(shelf, number, found):
        return None
    for old in found:
        shelf.remove_file(lease_name(old))
    _held[_key(shelf)] = lease = Lease(shelf, number, me)
    return lease


def _alone(shelf: Place, number: int, broken: Found) -> bool:
    """Whether nobody came between the look at the old leases and the new one; a starter that stood still gives way."""
    others = {n: text for n, (text, _) in read_leases(shelf).items() if n != number}
    if all(n in broken and broken[n][0] == text for n, text in others.items()) and others.keys() == broken.keys():
        return True
    shelf.remove_file(lease_name(number))
    return False


class _Watch:
    """What a starter has seen of the leases that are there, and since when."""

    def __init__(self, shelf: Place):
        self.shelf, self.since, self.said = shelf, time.monotonic(), False
        self.seen: Found | None = None

    def stale(self, found: Found) -> bool:
        """Whether nobody holds the shelf; raises where somebody does."""
        alive = {n: (text, h) for n, (text, h) in found.items() if h is None or not _is_dead(h)}
        if not alive:
            return True
        text, holder = alive[max(alive)]
        now = time.monotonic()
        if self.seen is None or alive.keys() != self.seen.keys():
            self.seen, self.since = alive, now
        watched, old = now - self.since, holder is None or time.time() - holder.renewed > STALE
        renewed = text != self.seen[max(alive)][0]
        if renewed or (holder and _is_here(holder) and not old and watched > DYING):
            raise FullshardError(f"{self.shelf} is written to by {holder}; end that, or write another checkpoint.path")
        if watched > DYING:
            self._say(holder)
        return watched > STALE or (old and watched > WATCHED)

    def _say(self, holder: Holder | None) -> None:
        if not self.said:
            who = holder or "somebody"
            text = f"{self.shelf} was last written to by {who}: waiting up to {STALE:.0f} s to see whether it lives"
            print(text, file=sys.stderr, flush=True)
            self.said = True


@contextmanager
def leased(shelf: Place, run: str = "") -> Iterator[Lease]:
    lease = take_lease(shelf, run)
    try:
        yield lease
    finally:
        lease.release()
