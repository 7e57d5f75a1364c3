"""From a row of a table to the sample that an objective trains on: masked text, pairs of texts, labelled texts and images.

A sample is a dict of arrays. Random choices depend on the seed and the sample's place in the run alone, so they are the
same at every world size and after a resume.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fullshard.base.errors import FullshardError, a_kind, nearest
from fullshard.data.images import Decode
from fullshard.data.text_encoder import TextEncoder
from fullshard.data.token_batches import IGNORED

Arrays = dict[str, NDArray[Any]]
TO_MASK, TO_RANDOM = 0.8, 0.9  # BERT's rule: 80% become the mask token, 10% a random one, 10% stay


class MakeSample(Protocol):
    """Makes samples. `i`: the sample's place in the run; `place` names the row in errors."""

    def __call__(self, row: Any, i: int, place: str) -> Any: ...


# -- text ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskText:
    """Masked language modelling: `share` of the tokens, at least one, are to be predicted."""

    encoder: TextEncoder
    column: str
    sequence: int
    share: float
    seed: int

    def __call__(self, row: Any, i: int, place: str) -> Arrays:
        ids, special = self.encoder(text_of(row, self.column, place), self.sequence)
        if special.all():
            raise FullshardError(f"{place} has no text to mask; leave it out")
        masked, labels = mask_tokens(ids, special, self.encoder, self.share, np.random.default_rng([self.seed % 2**64, i]))
        return {"input_ids": masked, "attention_mask": np.ones_like(ids), "labels": labels}


@dataclass(frozen=True)
class MaskTokens:
    """Masked language modelling on rows of packed tokens."""

    encoder: TextEncoder
    share: float
    seed: int

    def __call__(self, row: Any, i: int, place: str) -> Arrays:
        draw = np.random.default_rng([self.seed % 2**64, i])
        masked, labels = mask_tokens(row, np.zeros(row.size, np.bool_), self.encoder, self.share, draw)
        return {"input_ids": masked, "attention_mask": np.ones_like(row), "labels": labels}


def mask_tokens(
    ids: NDArray[np.int64], special: NDArray[np.bool_], encoder: TextEncoder, share: float, draw: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs with some tokens masked, and labels that are -100 everywhere else."""
    candidates = np.flatnonzero(~special)
    chosen = draw.choice(candidates, max(1, round(candidates.size * share)), replace=False)
    inputs, labels = ids.copy(), np.full_like(ids, IGNORED)
    labels[chosen] = ids[chosen]
    kinds, others = draw.random(chosen.size), draw.integers(0, encoder.vocab, chosen.size)
    inputs[chosen[kinds < TO_MASK]] = encoder.mask_id
    swapped = (kinds >= TO_MASK) & (kinds < TO_RANDOM)
    inputs[chosen[swapped]] = others[swapped]
    return inputs, labels


@dataclass(frozen=True)
class PairTexts:
    """Sequence to sequence: the ids of one text, and those of another as labels."""

    encoder: TextEncoder
    source: str
    target: str
    sequence: int
    target_sequence: int

    def __call__(self, row: Any, i: int, place: str) -> Arrays:
        ids = self.encoder(text_of(row, self.source, place), self.sequence).ids
        labels = self.encoder(text_of(row, self.target, place), self.target_sequence).ids
        for name, tokens in ((self.source, ids), (self.target, labels)):
            if not tokens.size:
                raise FullshardError(f"{place} has an empty {name!r}; leave it out")
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}


@dataclass(frozen=True)
class LabelText:
    """Classification: the ids of a text, and its class."""

    encoder: TextEncoder
    text: str
    label: "Labels"
    sequence: int

    def __call__(self, row: Any, i: int, place: str) -> Arrays:
        ids = self.encoder(text_of(row, self.text, place), self.sequence).ids
        if not ids.size:
            raise FullshardError(f"{place} has an empty {self.text!r}; leave it out")
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": self.label(row, place)}


def field_of(row: Any, column: str, place: str) -> Any:
    """A field of a sample."""
    if not isinstance(row, Mapping):
        raise FullshardError(f"{place} is {a_kind(row)}, without the field {column!r}; return dicts")
    if column not in row:
        known = [str(key) for key in row]
        raise FullshardError(f"{place} has no field {column!r} (it has {', '.join(known)}){nearest(column, known)}")
    return row[column]


def text_of(row: Any, column: str, place: str) -> str:
    value = field_of(row, column, place)
    if not isinstance(value, str):
        raise FullshardError(f"{place} has {a_kind(value)} in {column!r}, not text; leave it out, or name another column")
    return value


# -- labels and images -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labels:
    """The class of a row as a number. `names`: the classes by number, where the column has names."""

    column: str
    names: tuple[str, ...] | None
    classes: int | None  # how many the model tells apart

    def __call__(self, row: Any, place: str) -> NDArray[np.int64]:
        return np.int64(self.number(field_of(row, self.column, place), place))  # type: ignore[return-value]

    def number(self, value: Any, place: str) -> int:
        if isinstance(value, str) and self.names is not None:
            if value not in self.names:
                hint = nearest(value, list(self.names))
                known = ", ".join(self.names[:8])
                raise FullshardError(f"{place} has the label {value!r}, which the training data has not ({known}){hint}")
            return self.names.index(value)
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise FullshardError(f"{place} has {a_kind(value)} in {self.column!r}; a label is the number or the name of a class")
        if value < 0 or (self.classes is not None and value >= self.classes):
            raise FullshardError(
                f"{place} has the label {value}, but the model has the classes 0 to {(self.classes or 1) - 1}; give the model "
                "more, or number labels from 0"
            )
        return int(value)


@dataclass(frozen=True)
class LabelImage:
    """Image classification: `pixel_values` of 3 × size × size, and the class."""

    decode: Decode
    image: str
    label: Labels

    def __call__(self, row: Any, i: int, place: str) -> Arrays:
        return {"pixel_values": self.decode(field_of(row, self.image, place), place), "labels": self.label(row, place)}


# -- samples as they are ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeepSample:
    """The sample as it is. `columns`: what a batch calls each column, where some are renamed."""

    columns: tuple[tuple[str, str], ...] = ()

    def __call__(self, row: Any, i: int, place: str) -> Any:
        if self.columns:
            row = {name: field_of(row, column, place) for name, column in self.columns}
        if row is None:
            raise FullshardError(f"{place} is None; return a dict of arrays, or another tree of them")
        return {name: as_array(value) for name, value in row.items()} if type(row) is dict else row


def as_array(value: Any) -> Any:
    """A list of numbers, as tables have them, as an array. Everything else as it is."""
    if isinstance(value, list) and value:
        try:
            array = np.asarray(value)
        except ValueError:  # rows of unequal length
            return value
        return array if array.dtype.kind in "biuf" else value
    return value
