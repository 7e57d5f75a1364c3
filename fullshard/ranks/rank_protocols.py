"""What ranks offer each other, as Protocols: messages between them, and answers for a watchdog."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

Where = dict[str, Any]  # a rank: `waits`, `collective`, `unit`, `count` of collectives entered, `line` of code, `doing`


class Messages(Protocol):
    """Messages between ranks that need no collective, so that ranks in different places can still talk: see `ranks.messages`."""

    def put(self, key: str, value: Any) -> None: ...
    def get(self, key: str) -> Any: ...
    def claim(self, key: str) -> bool: ...

    def collect(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]: ...

    def wait(self, look: Callable[[], Any], seconds: float) -> Any: ...


class WatchedRanks(Protocol):
    """What the watchdog asks about the ranks, from its own thread."""

    rank: int
    world: int

    def where(self) -> Where:
        """Where this rank's main thread is."""

    def exchange(self, own: Where, seconds: float) -> dict[int, Where]:
        """Where all ranks are that answer in time."""

    def absent(self, rank: int) -> str:
        """What is known of a rank that does not answer."""

    def stacks(self) -> str: ...

    @property
    def keep_alive(self) -> Callable[[float | None], None]:
        """See `engine.ranks`."""

    def failed(self) -> int | None:
        """The exit code of the first failure that a rank has reported, if any."""
