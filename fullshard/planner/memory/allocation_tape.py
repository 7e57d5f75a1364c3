"""The record of a step's allocations and frees, in the order in which they happen."""

from collections.abc import Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from fullshard.planner.memory.allocator import GRAIN
from fullshard.planner.step.effects import COMPUTE, Row, Term

# Bytes, negative when they are freed; term; number of the allocation, the same when it is freed, 0 for a change of its term;
# stream; index of the operation that did it.
Entry = tuple[int, Term, int, int, int]


@dataclass
class Tape:
    """Allocations and frees in order."""

    entries: list[Entry] = field(default_factory=list)
    # By owner and tensor: number, bytes, term and stream.
    alive: dict[tuple[str, str], tuple[int, int, Term, int]] = field(default_factory=dict)
    count: int = 0
    made_once: set[tuple[str, str]] = field(default_factory=set)  # rows that are there for good
    folds: ClassVar[bool] = False  # True if it takes `folded_events`

    def allocate(self, owner: str, tensor: str, nbytes: int, term: Term, stream: int, operation: int) -> None:
        if nbytes <= 0:
            return
        self.free(owner, tensor, operation)
        self.count += 1
        self.alive[owner, tensor] = (self.count, nbytes, term, stream)
        self.entries.append((nbytes, term, self.count, stream, operation))

    def free(self, owner: str, tensor: str, operation: int) -> None:
        found = self.alive.pop((owner, tensor), None)
        if found is not None:
            number, nbytes, term, stream = found
            self.entries.append((-nbytes, term, number, stream, operation))

    def allocate_row(self, owner: str, tensor: str, row: Row, term: Term, stream: int, operation: int) -> None:
        """Allocate tensors that come and go together: `tensor` and their number are their names."""
        for i, nbytes in enumerate(row):
            self.allocate(owner, f"{tensor}{i}", nbytes, term, stream, operation)

    def allocate_once(self, owner: str, tensor: str, row: Row, term: Term, operation: int) -> None:
        """Allocate a row that stays for good, unless it is there."""
        if (owner, tensor) not in self.made_once:
            self.made_once.add((owner, tensor))
            self.allocate_row(owner, tensor, row, term, COMPUTE, operation)

    def allocate_beside(self, owner: str, beside: str, tensor: str, nbytes: int, term: Term, operation: int) -> None:
        """Allocate where the tensor `beside` is alive."""
        if (owner, beside) in self.alive:
            self.allocate(owner, tensor, nbytes, term, COMPUTE, operation)

    def free_all(self, owner: str, tensors: tuple[str, ...], operation: int) -> None:
        for tensor in tensors:
            self.free(owner, tensor, operation)

    def free_row(self, owner: str, tensor: str, row: Row, operation: int) -> None:
        for i in range(len(row)):
            self.free(owner, f"{tensor}{i}", operation)

    def replace_row(self, owner: str, old: str, before: Row, tensor: str, row: Row, term: Term, operation: int) -> None:
        """Allocate tensors, each before one of the `old` ones is freed."""
        for i, nbytes in enumerate(row):
            self.allocate(owner, f"{tensor}{i}", nbytes, term, COMPUTE, operation)
            self.free(owner, f"{old}{i}", operation)

    def rename(self, owner: str, tensor: str, name: str, term: Term, operation: int) -> None:
        """Give an allocation another name and term, if it is alive."""
        found = self.alive.pop((owner, tensor), None)
        if found is None:
            return
        number, nbytes, old, stream = found
        self.alive[owner, name] = (number, nbytes, term, stream)
        if old != term:  # two entries that cancel out, so that sums by term are right
            self.entries += [(-nbytes, old, 0, stream, operation), (nbytes, term, 0, stream, operation)]

    def repeat(self, start: int, names: dict[int, int], once: Set[int] = frozenset()) -> None:
        """Repeat all entries since `start`, provided that they left alive what they found. `names`: from the numbers of what was
        alive at `start` to the numbers that the same allocations have now. `once`: numbers that are not allocated again."""
        first = max((entry[2] for entry in self.entries[:start]), default=0)
        shift = self.count - first
        self.entries += [
            (delta, term, n + shift if n > first else names.get(n, n), stream, operation)
            for delta, term, n, stream, operation in self.entries[start:]
            if n not in once
        ]
        self.count += shift

    @property
    def deltas(self) -> list[int]:
        return [entry[0] for entry in self.entries]

    @property
    def terms(self) -> list[Term]:
        return [entry[1] for entry in self.entries]

    def rise(self, nbytes: int) -> None:
        """Allocate and free so many bytes at once. Only for tapes that fold."""
        assert self.folds


class PeakGauge(Tape):
    """A tape that keeps only the allocated bytes, now and at their highest: faster than a full record."""

    now = highest = 0
    folds = True

    def allocate(self, owner: str, tensor: str, nbytes: int, term: Term, stream: int, operation: int) -> None:
        if nbytes <= 0:
            return
        self.free(owner, tensor, operation)
        self.alive[owner, tensor] = (0, nbytes, term, stream)
        self.now += nbytes // -GRAIN * -GRAIN
        if self.now > self.highest:
            self.highest = self.now

    def allocate_row(self, owner: str, tensor: str, row: Row, term: Term, stream: int, operation: int) -> None:
        self.allocate(owner, tensor, rounded(row), term, stream, operation)

    def free_row(self, owner: str, tensor: str, row: Row, operation: int) -> None:
        self.free(owner, tensor, operation)

    def replace_row(self, owner: str, old: str, before: Row, tensor: str, row: Row, term: Term, operation: int) -> None:
        now = self.now
        for gone, nbytes in zip(before, row, strict=True):
            self.now += nbytes // -GRAIN * -GRAIN
            self.highest = max(self.highest, self.now)
            self.now -= gone // -GRAIN * -GRAIN
        self.now = now
        self.free(owner, old, operation)
        self.allocate(owner, tensor, rounded(row), term, COMPUTE, operation)

    def rise(self, nbytes: int) -> None:
        if self.now + nbytes > self.highest:
            self.highest = self.now + nbytes

    def free(self, owner: str, tensor: str, operation: int) -> None:
        found = self.alive.pop((owner, tensor), None)
        if found is not None:
            self.now -= found[1] // -GRAIN * -GRAIN


@lru_cache(maxsize=4096)
def rounded(row: Row) -> int:
    """Bytes that tensors of these sizes take."""
    return sum(nbytes // -GRAIN * -GRAIN for nbytes in row)
