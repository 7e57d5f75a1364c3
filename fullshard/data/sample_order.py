"""The order of samples: a keyed permutation that is computed, not stored.

Sample `i` of a run is a function of `i`, the seed and the number of samples. It needs no memory and no shuffle at start-up,
its only state is `i`, and every rank of every world size computes the same.
"""

import hashlib
from dataclasses import dataclass

ROUNDS = 6
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Order:
    """`order[i]` is the index of the run's i-th sample. Each epoch of `samples` samples has its own permutation."""

    samples: int
    seed: int = 0
    shuffle: bool = True

    def __getitem__(self, i: int) -> int:
        epoch, position = divmod(i, self.samples)
        return permute(position, self.samples, f"{self.seed}/{epoch}") if self.shuffle else position


def permute(i: int, n: int, key: str) -> int:
    """The image of `i` under the permutation of 0 … n − 1 that `key` selects.

    A Feistel network permutes the numbers below a power of four that is at least n. A result of n or more is permuted
    again until it is below n, which keeps it a permutation (cycle walking).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits
    keys = _round_keys(key)
    while True:
        i = _feistel(i, half, keys)
        if i < n:
            return i


def _feistel(i: int, half: int, keys: tuple[int, ...]) -> int:
    low = (1 << half) - 1
    left, right = i >> half, i & low
    for key in keys:
        left, right = right, left ^ (_mix(right, key) & low)
    return left << half | right


def _mix(x: int, key: int) -> int:
    """splitmix64's finaliser: every bit of the input changes about half the bits of the output."""
    x = (x + key) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def _round_keys(key: str) -> tuple[int, ...]:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(ROUNDS))
