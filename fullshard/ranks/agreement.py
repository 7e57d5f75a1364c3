"""Agreement between ranks. Knows no engine: each brings its own way to exchange values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from fullshard.base.errors import AgreedError, attempt, unwrap

T = TypeVar("T")


class RankAgreement(ABC):
    """All ranks of a run. Every method is collective, and safe in a background thread as long as no other thread calls one.

    Values are JSON: an engine may send them as text, and lists come back for tuples. `rank` is this one's number, of `world`.
    """

    rank: int
    world: int

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""

    def close(self) -> None:
        """Called once, when no rank will exchange anything more."""
        return

    def decide(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and return its result on all ranks. If it fails, all ranks raise its error."""
        found: T = unwrap(self.gather(attempt(make) if self.rank == 0 else None)[:1])[0]
        return found

    def first_decides(self, make: Callable[[], Any]) -> None:
        """Call `make` on rank 0 only. If it fails, all ranks raise its error."""

        def made() -> None:
            make()

        self.decide(made)

    def all_or_none(self, make: Callable[[], T]) -> T:
        """Call `make` on every rank; return this rank's result if all succeed. If one fails, all ranks raise its error, with
        its rank."""
        succeeded, result = attempt(make)
        outcomes = self.gather([succeeded, None if succeeded else result])
        failures = {rank: failure for rank, (good, failure) in enumerate(outcomes) if not good}
        if not failures:
            made: T = result
            return made
        rank, (sentence, code) = min(failures.items())
        raise AgreedError(sentence if len(failures) == len(outcomes) else f"rank {rank}: {sentence}", code)

    def gather_results(self, make: Callable[[], T]) -> list[T]:
        """Call `make` on every rank and return all results on all ranks. If one fails, all ranks raise its error."""
        return unwrap(self.gather(attempt(make)))

    def gather_integers(self, make: Callable[[], Sequence[int]], count: int) -> list[list[int]]:
        """As `gather_results`, for `count` 64-bit integers."""
        return [list(row) for row in self.gather_results(make)]

    def gather_then_finish(
        self, leaders: Collection[int], make: Callable[[], Sequence[int]], count: int, finish: Callable[[list[list[int]]], None]
    ) -> None:
        """Every rank makes `count` integers. If all succeed, the leaders call `finish` with all ranks' integers. If either
        fails on any rank, all ranks raise its error. Rank 0 must be a leader."""
        rows = self.gather_integers(make, count)
        self.gather_results(lambda: finish(rows) if self.rank in leaders else None)
