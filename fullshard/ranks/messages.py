"""Messages between ranks through a key-value store: who asks for one looks again and again, since the other rank may be gone."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

POLL = 0.05  # seconds between reads of the store


class PolledMessages(ABC):
    """The messages of a store. Values are JSON."""

    @abstractmethod
    def put(self, key: str, value: Any) -> None: ...

    @abstractmethod
    def get(self, key: str) -> Any:
        """The value of `key`, or None if it was never put."""

    @abstractmethod
    def claim(self, key: str) -> bool:
        """True for the first caller on any rank that claims `key`."""

    def collect(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """The values under `key/RANK` of those ranks that put one before the timeout."""
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
        """Call `look` until it returns something other than None; None after the timeout."""
        deadline = time.monotonic() + seconds
        while (found := look()) is None and time.monotonic() < deadline:
            time.sleep(POLL)
        return found
