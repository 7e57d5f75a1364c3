"""The rows of tokens that samples consist of: cut from one long stream, or whole documents packed together.

They follow from the token file alone: every rank of every world size has the same rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fullshard.data.token_files import TokenFile

Positions = NDArray[np.int64]


class Rows(Protocol):
    """`row(i)` is the positions in the file of row i's input tokens: at most the sequence length, in rising order."""

    def __len__(self) -> int: ...

    def row(self, i: int) -> Positions: ...


@dataclass(frozen=True)
class StreamRows:
    """Consecutive rows of one stream of all documents. The label of a row's last token is the next row's first."""

    tokens: int
    sequence: int

    def __len__(self) -> int:
        return max(0, self.tokens - 1) // self.sequence

    def row(self, i: int) -> Positions:
        return np.arange(i * self.sequence, (i + 1) * self.sequence)


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """Rows of whole documents, as many as fit into each, in their order.

    A document of more than sequence + 1 tokens is cut into full rows and a last piece, which shares its row with the next
    documents. The last token of a document predicts nothing. It is left out where it would need a row or a piece of its
    own. Every token except the first of a document is a label exactly once.
    """

    ends: Positions
    sequence: int

    @cached_property
    def pieces(self) -> tuple[Positions, Positions]:
        """The start and the length of each piece of a document."""
        firsts = np.concatenate([[0], self.ends[:-1]])
        lengths = self.ends - firsts
        counts = -((1 - lengths) // self.sequence)  # ⌈(length − 1) / sequence⌉
        document = np.repeat(np.arange(lengths.size), counts)
        offsets = (np.arange(document.size) - (np.cumsum(counts) - counts)[document]) * self.sequence
        return firsts[document] + offsets, np.minimum(lengths[document] - offsets, self.sequence)

    @cached_property
    def firsts(self) -> list[int]:
        """The first piece of each row, followed by the number of pieces."""
        edges = np.concatenate([[0], np.cumsum(self.pieces[1])])
        # nexts[p]: the first piece of the next row, if a row began with piece p. The loop then runs over rows only.
        nexts = (np.searchsorted(edges, edges[:-1] + self.sequence, side="right") - 1).tolist()
        firsts = [0]
        while firsts[-1] < len(nexts):
            firsts.append(nexts[firsts[-1]])
        return firsts

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def row(self, i: int) -> Positions:
        starts, lengths = (column[self.firsts[i] : self.firsts[i + 1]] for column in self.pieces)
        before = np.cumsum(lengths) - lengths
        return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The rows of a token file's stream as a data set: row i is an array of `sequence` tokens."""

    source: TokenFile
    sequence: int

    def __len__(self) -> int:
        return len(self.source) // self.sequence

    def __getitem__(self, i: int) -> Positions:
        return self.source.read(i * self.sequence, self.sequence).astype(np.int64)
