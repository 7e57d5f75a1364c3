"""The store of one start of the ranks, free of what an earlier start left in it.

torchrun keeps one store over its restarts, and torch does not tell the starts apart in it: a restarted rank finds the
addresses of processes that are dead. Here ranks first agree on who is there, by names that no earlier process had, and all
keys of the start are prefixed by that.
"""

import hashlib
import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from fullshard.errors import FullshardError
from fullshard.on_torch.store_messages import POLL, Board

PATIENCE = timedelta(minutes=10)  # for ranks that start late


def shares_a_store() -> bool:
    """Whether the launcher keeps the store that ranks meet in."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def own_store() -> dist.Store:
    """A part of the launcher's store that belongs to this start alone. Collective."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world, is_master=False, timeout=PATIENCE)
    return dist.PrefixStore(f"start-{agree_on_start(store, rank, world)}", store)


def agree_on_start(store: dist.Store, rank: int, world: int, patience: timedelta = PATIENCE) -> str:
    """A name for this start, the same on all its ranks and on none of an earlier one.

    The first rank lists who has joined; the list counts when everybody on it has said so. A name that a dead process
    left behind never does, and is replaced by that of its successor.
    """
    board, me = Board(store), secrets.token_hex(8)
    board.put(f"join/{rank}", me)
    deadline = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline:
        members = _list_members(board, world) if rank == 0 else board.get("members")
        if members and len(members) == world and members[rank] == me:
            start = hashlib.sha256("".join(members).encode()).hexdigest()[:16]
            board.put(f"{start}/agreed/{rank}", True)
            if _settled(board, start, rank, world):
                return start
        time.sleep(POLL)
    here = board.collect("join", range(world), 0)
    missing = [r for r in range(world) if r not in here]
    raise FullshardError(
        f"ranks did not all start within {patience.total_seconds():.0f} s"
        + (f": {missing[0]} and {len(missing) - 1} more are missing" if missing else "")
        + "; look at the output of each machine"
    )


def _list_members(board: Board, world: int) -> list[str] | None:
    """By the first rank: who has joined, as far as it knows now."""
    joined = board.collect("join", range(world), 0)
    if len(joined) < world:
        return None
    members = [joined[r] for r in range(world)]
    board.put("members", members)
    return members


def _settled(board: Board, start: str, rank: int, world: int) -> bool:
    """Whether all ranks agree on `start`. The first rank counts, the others hear of it."""
    if rank == 0 and len(board.collect(f"{start}/agreed", range(world), 0)) == world:
        board.put(f"{start}/settled", True)
    return board.get(f"{start}/settled") is not None
