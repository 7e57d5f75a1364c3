"""A store for one start of the ranks, without leftovers of an earlier start.

torchrun keeps one store over restarts, and torch uses the same keys in it each time: a restarted rank can read the
addresses of dead processes. Here ranks first agree on the set of living processes, each under a random name. A hash of
these names prefixes all keys of the start.
"""

import hashlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from fullshard.base.errors import LOST, REFUSED, FullshardError, first_line
from fullshard.base.status import tell
from fullshard.base.text import listed
from fullshard.on_torch.ranks.interfaces import GLOO, choose_interface, offer_address
from fullshard.on_torch.ranks.store_messages import StoreClient
from fullshard.ranks.hang_reports import call_with_timeout
from fullshard.ranks.messages import POLL

START_TIMEOUT = timedelta(minutes=10)  # for ranks that start late
PATIENCE = 5.0  # seconds until a person hears that nobody answers
CONNECT = 3.0  # seconds for one attempt
LOOK = 1.0  # seconds between looks whether another rank has given up
NOT_JOINED = "not joined"


def launcher_has_store() -> bool:
    """True if the launcher hosts the store that the ranks meet in. Otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join(backend: str) -> None:
    """Join the ranks that a launcher started. Every rank must call it."""
    rank, world = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 1))
    store = start_store(rank, world)
    with _joined_by_all(StoreClient(store)):
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def start_store(rank: int, world: int) -> dist.Store:
    """The store that the ranks meet in, under a prefix that only this start uses. Chooses the network interface. Every rank must
    call it."""
    if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise FullshardError(f"RANK is set, but not {listed(missing)}; start the ranks with torchrun or srun")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and not launcher_has_store()
    if not hosts:
        _wait_for_store(address, port)
    try:
        store = dist.TCPStore(address, port, world, is_master=hosts, timeout=START_TIMEOUT, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if not hosts:
            raise
        why = "is in use" if "EADDRINUSE" in str(error) else f"cannot be taken ({first_line(error)})"
        raise FullshardError(f"port {port} of {socket.gethostname()} {why}; set MASTER_PORT to a free one") from error
    client = StoreClient(store)
    own = offer_address(client, address)
    start = agree_on_start(store, rank, world)
    choose_interface(client, own)
    return dist.PrefixStore(f"start-{start}", store)


def _wait_for_store(address: str, port: int) -> None:
    """Wait until somebody listens where the ranks meet. The first machine may start late, so a wrong address is only said."""
    began, said = time.monotonic(), os.environ.get("LOCAL_RANK", "0") != "0"
    while True:
        try:
            socket.create_connection((address, port), CONNECT).close()
            return
        except OSError as error:
            waited, why = time.monotonic() - began, error.strerror or error
        nobody = f"nobody answers at {address}:{port}"
        hint = "rank 0 should run there; set MASTER_ADDR and MASTER_PORT, or torchrun's --master-addr, if it does not"
        if waited > START_TIMEOUT.total_seconds():
            raise FullshardError(f"{nobody} ({why}); {hint}")
        if waited > PATIENCE and not said:
            tell(f"{socket.gethostname()}: {nobody} yet ({why}): {hint}")
            said = True
        time.sleep(POLL)


@contextmanager
def _joined_by_all(client: StoreClient) -> Iterator[None]:
    """Inside, ranks connect to each other. Where one cannot, those that wait for it end, too, before half an hour is over."""
    done = threading.Event()
    threading.Thread(target=_end_with_others, args=(client.store, done), daemon=True, name="joining").start()
    try:
        yield
    except RuntimeError as error:
        host, chosen = socket.gethostname(), os.environ.get(GLOO, "not set")
        sentence = (
            f"{host} cannot reach the other ranks ({first_line(error)}); set {GLOO}, which is {chosen} there, to the "
            "interface that leads to the other machines"
        )
        call_with_timeout(PATIENCE, lambda: client.put(NOT_JOINED, sentence))
        time.sleep(2 * LOOK)  # the store may end with this machine's ranks
        raise FullshardError(sentence) from error
    finally:
        done.set()


def _end_with_others(store: dist.Store, done: threading.Event) -> None:
    """In a thread: end this process when another rank could not join, or when the store is gone."""

    def look() -> tuple[str, int] | None:
        try:
            sentence = StoreClient(store).get(NOT_JOINED)
        except RuntimeError:
            return "the first machine is gone while ranks connect to each other; look at its output", LOST
        return (sentence, REFUSED) if sentence else None

    while not done.wait(LOOK):
        found = call_with_timeout(PATIENCE, look)  # None also where the store is slow
        if found and not done.is_set():
            print(f"error: {found[0]}", file=sys.stderr, flush=True)
            os._exit(found[1])


def agree_on_start(store: dist.Store, rank: int, world: int) -> str:
    """A name for this start, the same on all its ranks and different from every earlier start's.

    Rank 0 names a start after the processes that have joined, and tells each rank whom it has counted there. The start is
    agreed when every one of them has confirmed it. A dead process never confirms, so its name is replaced once its successor
    joins.
    """
    client, me = StoreClient(store), secrets.token_hex(8)
    client.put(f"join/{rank}", me)
    deadline = time.monotonic() + START_TIMEOUT.total_seconds()
    counted: list[str] = []
    while time.monotonic() < deadline:
        if rank == 0:
            counted = _count_members(client, world, counted)
        who, start = client.get(f"counted/{rank}") or ("", "")
        if who == me:
            client.put(f"{start}/agreed/{rank}", True)
            if _is_confirmed(client, start, rank, world):
                return start
        time.sleep(POLL)
    joined = client.collect("join", range(world), 0)
    missing = [str(r) for r in range(world) if r not in joined]
    raise FullshardError(
        f"ranks did not all start within {START_TIMEOUT.total_seconds():.0f} s"
        + (f" ({len(missing)} are missing: {', '.join(missing[:8])}{' …' if len(missing) > 8 else ''})" if missing else "")
        + "; look at the output of each machine"
    )


def _count_members(client: StoreClient, world: int, before: list[str]) -> list[str]:
    """On rank 0: who has joined, once all ranks have. Tells each rank where that is not what it was before."""
    joined = client.collect("join", range(world), 0)
    if len(joined) < world or (members := [joined[r] for r in range(world)]) == before:
        return before
    start = hashlib.sha256("".join(members).encode()).hexdigest()[:16]
    for rank, who in enumerate(members):
        client.put(f"counted/{rank}", [who, start])
    return members


def _is_confirmed(client: StoreClient, start: str, rank: int, world: int) -> bool:
    """True once all ranks have confirmed `start`. Rank 0 counts and publishes the result."""
    if rank == 0 and len(client.collect(f"{start}/agreed", range(world), 0)) == world:
        client.put(f"{start}/settled", True)
    return client.get(f"{start}/settled") is not None
