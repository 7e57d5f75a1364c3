"""What the loop over micro-batches of a compiled program carries, read from its HLO text."""

from collections.abc import Iterable

from fullshard.on_jax.communication.hlo_collectives import computations_of, shapes_in, unit_in

Dims = tuple[int, ...]


def loop_values(text: str) -> list[Dims]:
    """The dims of every floating-point array that the loop has in memory from one micro-batch to the next, as `alike`."""
    found: list[Dims] = []
    for line in computations_of(text)["ENTRY"]:
        result, is_loop, _ = line.partition(" while(")
        if is_loop and not unit_in(line) and "jvp(" not in line:
            found += [alike(dims) for dtype, dims in shapes_in(result) if dtype.startswith(("f", "bf"))]
    return found


def alike(dims: Iterable[int]) -> Dims:
    """The same for all arrays that XLA may make of one by transposing it."""
    return tuple(sorted(d for d in dims if d > 1))
