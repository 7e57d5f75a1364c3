"""Messages between ranks outside of collectives: keys of the store through which they met.

A collective needs every rank in the same place. This needs nobody: what ranks have to say when they disagree, fail or hang
goes here.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from fullshard.on_torch.private import default_store

T = TypeVar("T")
POLL = 0.05  # seconds between looks


class Board:
    """A connection of its own to the ranks' store, for one thread."""

    def __init__(self, store: dist.Store | None = None):
        own = store or default_store()
        self.store = own.clone() if hasattr(own, "clone") else own

    def put(self, key: str, value: Any) -> None:
        self.store.set(f"fullshard/{key}", json.dumps(value))

    def get(self, key: str) -> Any:
        """None where nobody has put anything."""
        full = f"fullshard/{key}"
        return json.loads(self.store.get(full)) if self.store.check([full]) else None

    def first(self, key: str) -> bool:
        """Whether nobody has asked this of `key` before."""
        return self.store.add(f"fullshard/{key}", 1) == 1

    def collect(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """What these ranks have put under `key/RANK`, of those that did so in time."""
        found: dict[int, Any] = {}
        wanted, deadline = list(ranks), time.monotonic() + seconds
        while wanted:
            found |= {r: value for r in wanted if (value := self.get(f"{key}/{r}")) is not None}
            wanted = [r for r in wanted if r not in found]
            if not wanted or time.monotonic() > deadline:
                break
            time.sleep(POLL)
        return found

    def wait(self, look: Callable[[], Any], seconds: float) -> Any:
        """What `look` finds, as soon as it is something; None where it is nothing in time."""
        deadline = time.monotonic() + seconds
        while (found := look()) is None and time.monotonic() < deadline:
            time.sleep(POLL)
        return found


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What `ask` returns; None where it fails or takes longer: the store may have gone with the rank that kept it."""
    answer: list[T] = []

    def call() -> None:
        try:
            answer.append(ask())
        except Exception:  # whatever a store raises that is going down
            return

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None
