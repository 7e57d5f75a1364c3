"""A store for one start of the ranks, without leftovers of an earlier start.

torchrun keeps one store over restarts, and torch uses the same keys in it each time: a restarted rank can read the
addresses of dead processes. Here ranks first agree on the set of living processes, each under a random name. A hash of
these names prefixes all keys of the start.
"""

import hashlib
import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from fullshard.base.errors import FullshardError
from fullshard.on_torch.ranks.store_messages import StoreClient
from fullshard.ranks.messages import POLL

START_TIMEOUT = timedelta(minutes=10)  # for ranks that start late


def launcher_has_store() -> bool:
    """True if the launcher hosts the store that the ranks meet in."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def start_store() -> dist.Store:
    """The launcher's store under a prefix that only this start uses. Every rank must call it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world, is_master=False, timeout=START_TIMEOUT)
    return dist.PrefixStore(f"start-{agree_on_start(store, rank, world)}", store)


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
