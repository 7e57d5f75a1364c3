"""Arrays whose parts are read by their byte ranges, each device's part by itself."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fullshard.on_jax.tensors.dtypes import Shape

Box = tuple[tuple[int, int], ...]  # start and stop in each dim


def read_boxes(
    shape: Shape, sharding: jax.sharding.Sharding, stored: Any, read: Callable[[Box, memoryview], None], dtype: Any = None
) -> jax.Array:
    """The array that lies as `sharding` says. `read`: fills memory with a box of the tensor, which is of dtype `stored`. A part
    that several devices of this process hold is read once. `dtype`: the array's, by default the same."""
    known: dict[Box, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        box = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        if box not in known:
            found = np.empty([b - a for a, b in box], stored)
            read(box, found.reshape(-1).view(np.uint8).data)
            known[box] = found if dtype is None else found.astype(dtype)
        return known[box]

    return jax.make_array_from_callback(shape, sharding, part)
