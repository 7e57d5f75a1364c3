"""Which tokens each sample of a run holds: cut from one long stream, or whole documents side by side.

Computed from the token file alone, so that every rank of every world size has the same rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


class Rows(Protocol):
    """`row(i)`: where in the file the input tokens of row i lie; at most a sequence of them, in rising order."""

    def __len__(self) -> int: ...

    def row(self, i: int) -> Positions: ...


@dataclass(frozen=True)
class Stream:
    """Rows end to end over all documents; each needs one token more than it is long, shared with the next."""

    tokens: int
    sequence: int

    def __len__(self) -> int:
        return max(0, self.tokens - 1) // self.sequence

    def row(self, i: int) -> Positions:
        return np.arange(i * self.sequence, (i + 1) * self.sequence)


@dataclass(frozen=True, eq=False)
class Whole:
    """As many whole documents a row as fit, in their order.

    A document of more than sequence + 1 tokens is cut: full rows of its own, and a last piece that shares its
    row with what follows. The last token of a document predicts nothing, so it never costs a row or a piece of
    its own: it is left out where it would. Every token but a document's first is a label exactly once.
    """

    ends: Positions
    sequence: int

    @cached_property
    def pieces(self) -> tuple[Positions, Positions]:
        """Where each piece of a document starts, and how long it is."""
        firsts = np.concatenate([[0], self.ends[:-1]])
        lengths = self.ends - firsts
        counts = -((1 - lengths) // self.sequence)  # ⌈(length − 1) / sequence⌉
        document = np.repeat(np.arange(lengths.size), counts)
        offsets = (np.arange(document.size) - (np.cumsum(counts) - counts)[document]) * self.sequence
        return firsts[document] + offsets, np.minimum(lengths[document] - offsets, self.sequence)

    @cached_property
    def firsts(self) -> list[int]:
        """The first piece of each row, and the number of pieces at the end."""
        edges = np.concatenate([[0], np.cumsum(self.pieces[1])])
        # If a row started at this piece, the next would start there; then only the rows are walked.
        nexts = (np.searchsorted(edges, edges[:-1] + self.sequence, side="right") - 1).tolist()
        found = [0]
        while found[-1] < len(nexts):
            found.append(nexts[found[-1]])
        return found

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def row(self, i: int) -> Positions:
        starts, lengths = (column[self.firsts[i] : self.firsts[i + 1]] for column in self.pieces)
        before = np.cumsum(lengths) - lengths
        return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
