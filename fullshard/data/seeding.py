"""Random numbers that depend on a seed and a sample alone, so that a sample is the same whoever makes it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def sample_seed(seed: int, i: int) -> int:
    """64 bits that depend on both numbers."""
    return int(np.random.SeedSequence([seed % 2**64, i]).generate_state(1, np.uint64)[0])


@contextmanager
def seeded(seed: int, i: int) -> Iterator[None]:
    """Inside, random numbers of Python and numpy depend on `seed` and `i` alone. Afterwards as before."""
    state = sample_seed(seed, i)
    python, arrays = random.getstate(), np.random.get_state()
    random.seed(state)
    np.random.seed(state % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
