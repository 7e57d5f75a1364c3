"""Builds the micro-batches of one rank from a token file, in one global order of samples."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fullshard.base.errors import FullshardError, nearest
from fullshard.data.sample_order import Order
from fullshard.data.step_batches import BatchLoader, IndexedBatches, PlainLoader
from fullshard.data.token_files import TokenFile
from fullshard.data.token_rows import DocumentRows, Rows, StreamRows

IGNORED = -100  # the label of a token that is not to be predicted
PADDING = 0  # the input token of padding

MicroBatch = dict[str, NDArray[np.int64]]
Boundaries = Literal["ignored", "labels", "attention"]
Packing = Literal["stream", "whole"]


@dataclass
class Batches(IndexedBatches):
    """The micro-batches of one rank from a token file; see `StepBatches` for rank, accumulate and cursor.

    `boundaries`: with `labels`, no token predicts the first token of the next document; with `attention`, batches also
    have `position_ids` that start again at 0 with each document. `packing`: samples are cut from one `stream` of tokens,
    or hold `whole` documents and padding.
    """

    source: TokenFile
    sequence: int
    micro_batch: int
    accumulate: int = 1
    rank: int = 0
    ranks: int = 1
    seed: int = 0
    shuffle: bool = True
    boundaries: Boundaries = "ignored"
    packing: Packing = "stream"
    cursor: int = 0
    last: int | None = None
    loader: BatchLoader = field(default_factory=PlainLoader)

    def __post_init__(self) -> None:
        self._refuse_options()
        self.ends = self.source.ends() if self.boundaries != "ignored" else None
        self.rows = self._rows()
        self._refuse_empty()
        self.refuse_share()
        self.order = Order(self.samples, self.seed, self.shuffle)

    def _refuse_options(self) -> None:
        for name, given, known in (
            ("boundaries", self.boundaries, get_args(Boundaries)),
            ("packing", self.packing, get_args(Packing)),
        ):
            if given not in known:
                raise FullshardError(f"{name} is one of {', '.join(known)}, not {given!r}{nearest(str(given), list(known))}")
        if self.packing == "whole" and self.boundaries == "ignored":
            raise FullshardError(
                "packing 'whole' keeps documents apart, boundaries 'ignored' runs them together; "
                "write boundaries 'labels' or 'attention', or packing 'stream'"
            )

    def _refuse_empty(self) -> None:
        """Raise if there is no sample, or no token to predict."""
        path = self.source.path
        if self.samples < 1 and self.packing == "whole":
            raise FullshardError(f"{path} has no document of two tokens or more, so nothing to predict; pack other text")
        if self.samples < 1:
            raise FullshardError(
                f"{path} has {len(self.source)} tokens, too few for one sample of {self.sequence} + 1; "
                "pack more text, or use a shorter sequence"
            )
        if not self.source.answers:
            raise FullshardError(f"{path} has no token marked as an answer, so nothing to predict; pack it again")

    def _rows(self) -> Rows:
        if self.packing == "whole" and self.ends is not None:
            return DocumentRows(self.ends, self.sequence)
        return StreamRows(len(self.source), self.sequence)

    @property
    def samples(self) -> int:
        """The number of samples in one epoch."""
        return len(self.rows)

    def load(self, first: int) -> MicroBatch:
        rows = [self.sample(first + row) for row in range(self.micro_batch)]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def sample(self, i: int) -> MicroBatch:
        """Sample `i` of the run: `input_ids`, `labels` and, with boundaries `attention`, `position_ids`."""
        positions = self.rows.row(self.order[i])
        base, stop = int(positions[0]), min(int(positions[-1]) + 2, len(self.source))
        tokens = np.append(self.source.read(base, stop - base), IGNORED)  # the file's last token has no next one
        labels = tokens[positions - base + 1]
        if self.source.has_answers:
            answers = np.append(self.source.read_answers(base, stop - base), False)
            labels[~answers[positions - base + 1]] = IGNORED
        sample = {"input_ids": tokens[positions - base], "labels": labels}
        if self.ends is not None:
            low, high = np.searchsorted(self.ends, [base, int(positions[-1]) + 1], side="right")
            inside = self.ends[low:high]
            labels[np.isin(positions + 1, inside, assume_unique=True)] = IGNORED
            if self.boundaries == "attention":
                sample["position_ids"] = _position_ids(np.isin(positions, inside, assume_unique=True))
        return {key: self._padded(key, row) for key, row in sample.items()}

    def _padded(self, key: str, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """A row filled up to the sequence length. Padding counts as a document of its own: its positions start at 0."""
        missing = self.sequence - row.size
        if not missing:
            return row
        fill = np.arange(missing) if key == "position_ids" else np.full(missing, IGNORED if key == "labels" else PADDING)
        return np.concatenate([row, fill])


def _position_ids(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The distance of each token from the last document start at or before it. The first token counts as one."""
    positions = np.arange(starts.size)
    return positions - np.maximum.accumulate(np.where(starts, positions, 0))


def digest(batch: Mapping[str, Any]) -> int:
    """A hash of 63 bits. Two ranks with equal digests have read the same samples."""
    hashed = hashlib.blake2b(digest_size=8)
    for key in sorted(batch):
        array = np.ascontiguousarray(batch[key])
        hashed.update(f"{key} {array.dtype.str} {array.shape} ".encode())
        hashed.update(array.tobytes())
    return int.from_bytes(hashed.digest(), "little") >> 1
