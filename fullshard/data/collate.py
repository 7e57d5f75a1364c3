"""Puts samples together to a micro-batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fullshard.base.errors import FullshardError, first_line
from fullshard.data.objective_samples import Arrays

Collate = Callable[[Sequence[Any]], Any]
Pad = Literal["longest", "full"]
MULTIPLE = 8  # padded lengths are multiples of this: matrix products are faster, and there are fewer shapes


@dataclass(frozen=True)
class PadRows:
    """Stacks samples and pads dim 0 of each array. `fills`: key to (what to pad with, the longest length)."""

    fills: tuple[tuple[str, int, int], ...]
    pad: Pad

    def __call__(self, samples: Sequence[Arrays]) -> Arrays:
        fills = {key: (fill, longest) for key, fill, longest in self.fills}
        return {key: self._column([s[key] for s in samples], fills.get(key)) for key in samples[0]}

    def _column(self, rows: list[Any], fill: tuple[int, int] | None) -> Any:
        if fill is None:
            return np.stack(rows)
        value, longest = fill
        size = longest if self.pad == "full" else min(longest, -(-max(len(r) for r in rows) // MULTIPLE) * MULTIPLE)
        return np.stack([np.pad(r, (0, size - len(r)), constant_values=value) for r in rows])


def stack_rows(samples: Sequence[Arrays]) -> Arrays:
    """Samples of equal shapes, stacked."""
    return {key: np.stack([s[key] for s in samples]) for key in samples[0]}


def collated(collate: Collate, samples: Sequence[Any], places: Sequence[str], remedy: str) -> Any:
    """The batch of some samples. Raises a sentence if they differ in shape or cannot be put together."""
    try:
        return collate(samples)
    except FullshardError:
        raise
    except Exception as error:
        first = dict(shapes(samples[0]))
        for sample, place in zip(samples, places, strict=True):
            for path, shape in shapes(sample):
                if first.get(path) != shape:
                    differ = f"{path or 'a shape'} of {_text(shape)}, but {places[0]} of {_text(first.get(path))}"
                    raise FullshardError(f"{place} has {differ}; {remedy}") from None
        raise FullshardError(
            f"the samples from {places[0]} on cannot be put into a batch ({type(error).__name__}: {first_line(error)}); {remedy}"
        ) from None


def shapes(tree: Any, path: str = "") -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """The shape of every array of a sample by its path; None for what is no array."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from shapes(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple) and not all(isinstance(v, int | float) for v in tree):
        for key, value in enumerate(tree):
            yield from shapes(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        yield path, (len(tree),)
    else:
        shape = getattr(tree, "shape", None)
        yield path, None if shape is None else tuple(shape)


def _text(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else " × ".join(map(str, shape)) or "a number"
