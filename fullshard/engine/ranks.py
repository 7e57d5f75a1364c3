"""What an engine does for the ranks of a run: joining them, agreement and messages between them. Knows no engine."""

from typing import Protocol

from fullshard.plan.plan import Mesh
from fullshard.ranks.agreement import RankAgreement
from fullshard.ranks.hang_reports import HangReporter
from fullshard.ranks.rank_protocols import Messages, Where


class Ranks(Protocol):
    """The ranks of a run. Collective functions are called by every rank, on its main thread."""

    def start(self) -> object:
        """Join the ranks that a launcher started, or be the only one. Idempotent."""

    def finish(self) -> None: ...

    def have_met(self) -> bool:
        """Whether this rank has joined others, or is the only one of a run that has begun."""

    def all_devices(self) -> int:
        """How many devices the ranks have together: what a plan is for. One each on torch; a JAX process has several."""

    def rank_and_world(self) -> tuple[int, int]: ...

    def is_first(self) -> bool:
        """Whether this rank writes files and prints."""

    def data_share(self, mesh: Mesh) -> tuple[int, int]:
        """Which share of a step's rows this rank computes, and of how many equal ones."""

    def agreement(self) -> RankAgreement:
        """All ranks, for their main threads."""

    def messages(self) -> Messages: ...

    def lost_a_peer(self, error: BaseException) -> bool:
        """True if an error only says that the connection to another rank is lost."""

    def position(self) -> Where:
        """Where this rank's main thread is, for a call from another thread."""

    def keep_alive(self, seconds: float | None) -> None:
        """Let the launcher kill this process unless it calls again within `seconds`; None: let it live. Does nothing where the
        launcher has no such timer."""

    def versions(self) -> dict[str, str]:
        """The libraries whose versions must agree between ranks."""


def watched_ranks(ranks: Ranks) -> HangReporter:
    """What the watchdog asks. Every rank's main thread calls this once they have met."""
    return HangReporter(*ranks.rank_and_world(), ranks.messages, ranks.position, ranks.keep_alive)
