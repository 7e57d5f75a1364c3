"""Adam's moments in few bits: how they are stored, and stochastic rounding.

`bf16` is an fp32 value without its low 16 bits. `int8` is 8 bits an element, in blocks of 256 with a scale, which is a power of
two: the binade of the block's largest value. A code is a float with 3 bits of mantissa. The first moment has a sign and 16
binades below the scale, the second moment has no sign and 32. So a value is off by at most an eighth, whatever its block, unless
it is below all binades. Then a first moment becomes zero or the smallest code. A second moment becomes the smallest code: the
update divides by its root.

A value that a code has is kept by every rounding. So decoded moments can be encoded again, also in other blocks, without loss.

All steps are integer operations on the bits of fp32 values, and give the same codes on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fullshard.plan.choices import BLOCK, SCALE_BYTES, MomentKind

BLOCK_BYTES = SCALE_BYTES + BLOCK  # of a block: its scale, then its codes
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
BINADES = {True: 16, False: 32}  # of a code, by whether it has a sign
MANTISSA, DROPPED = 23, 20  # bits of an fp32 mantissa, and those of them that a code drops
LOWEST = 64  # exponent field of the smallest scale, 2^-63: codes below it stay clear of underflow
LARGEST = 0x7F800000  # bits of infinity
RANDOM = 1 << 16  # stochastic rounding takes 16 bits
NEAREST = RANDOM // 2  # in their place: rounds to the nearest


@dataclass(frozen=True)
class MomentFormat:
    """How a moment is stored. Of `int8`, blocks are counted from the start of what is stored."""

    kind: MomentKind

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored tensor."""
        return DTYPES[self.kind]

    @property
    def saved(self) -> torch.dtype:
        """In which a checkpoint has it."""
        return torch.float32 if self.coded else self.dtype

    @property
    def coded(self) -> bool:
        """True if the stored tensor is one of bytes, not of values."""
        return self.kind == "int8"

    def size(self, elements: int) -> int:
        """Length of the stored tensor."""
        return -(-elements // BLOCK) * BLOCK_BYTES if self.coded else elements

    def part(self, stored: Tensor, start: int, stop: int) -> Tensor:
        """The stored elements from `start`, a multiple of the block, to `stop`."""
        if not self.coded:
            return stored[start:stop]
        return stored[start // BLOCK * BLOCK_BYTES : self.size(stop)]

    def decode(self, stored: Tensor, elements: int, *, signed: bool) -> Tensor:
        """The values in fp32, flat; of an fp32 moment, the stored tensor itself."""
        if not self.coded:
            return stored.float()
        rows = stored.view(-1, BLOCK_BYTES)
        codes = rows[:, SCALE_BYTES:].to(torch.int32)
        sizes = codes & (0x7F if signed else 0xFF)
        bits = (sizes << DROPPED) + _base(_scale_bits(rows), signed)
        bits.masked_fill_(sizes == 0, 0)
        if signed:
            bits |= (codes & 0x80) << 24
        return bits.view(torch.float32).flatten()[:elements]

    def encode(self, values: Tensor, random: Tensor | int, stored: Tensor, *, signed: bool) -> None:
        """Write fp32 values into `stored`. `random`: an integer below 2^16 for each element, or NEAREST."""
        if self.kind == "fp32":
            if values.data_ptr() != stored.data_ptr():
                stored.copy_(values)
        elif self.kind == "bf16":
            stored.copy_(round_to_bf16(values, random))
        else:
            bits = random if isinstance(random, int) else _whole_blocks(random)
            _encode_blocks(_whole_blocks(values), bits, stored.view(-1, BLOCK_BYTES), signed)


def round_to_bf16(values: Tensor, random: Tensor | int) -> Tensor:
    """Values of fp32 rounded up or down to bf16, with the probabilities that keep their mean."""
    return ((values.view(torch.int32) + random) >> 16).to(torch.int16).view(torch.bfloat16)


def _encode_blocks(values: Tensor, random: Tensor | int, rows: Tensor, signed: bool) -> None:
    bits = values.view(torch.int32)
    sizes = bits & 0x7FFFFFFF
    # One step of the code above the largest value: it may be rounded up, into the next binade.
    top = (sizes.amax(1, keepdim=True).clamp_(max=LARGEST) + ((1 << DROPPED) - 1)) >> MANTISSA
    scale = top.clamp_(min=LOWEST) << MANTISSA
    base = _base(scale, signed)
    smallest = base + (1 << DROPPED)
    codes = (sizes - base + (random << (DROPPED - 16))) >> DROPPED
    if signed:
        chance = sizes.view(torch.float32) * (RANDOM / smallest.view(torch.float32))
        below = chance > random
    else:
        below = sizes > 0
    codes = torch.where(sizes < smallest, below.to(torch.int32), codes)
    if signed:
        codes |= (bits >> 24) & 0x80
    _scale_bits(rows).copy_(scale)
    rows[:, SCALE_BYTES:] = codes.to(torch.uint8)


def _scale_bits(rows: Tensor) -> Tensor:
    return rows[:, :SCALE_BYTES].view(torch.int32)


def _base(scale: Tensor, signed: bool) -> Tensor:
    """What the bits of a decoded value have beside its code, from the bits of its scale."""
    return scale - ((BINADES[signed] - 1) << MANTISSA)


def _whole_blocks(values: Tensor) -> Tensor:
    """Rows of blocks; the last one is filled with zeros."""
    rest = -values.numel() % BLOCK
    return (torch.nn.functional.pad(values, (0, rest)) if rest else values).view(-1, BLOCK)


# -- random bits ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ElementRange:
    """Which elements of a whole parameter a rank's part has, in its order: runs of `columns` elements, `stride` apart, from
    `first` on. `seed`: of the parameter. Random bits depend on both and the step alone, so that they are the same at any world
    size, in any home and after a resume."""

    seed: int
    first: int = 0
    columns: int = 1
    stride: int = 1

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Positions in the whole parameter of the part's elements from `start` to `stop`, modulo 2^32, as int32."""
        if self.columns == self.stride:
            return torch.arange(stop - start, dtype=torch.int32, device=device) + _signed(self.first + start)
        at = torch.arange(start, stop, device=device)
        return (self.first + at // self.columns * self.stride + at % self.columns).to(torch.int32)

    def key(self, step: int) -> int:
        """Of the step's random bits."""
        return _mix_number(self.seed + 0x9E3779B9 * step)

    def random(self, step: int, start: int, stop: int, device: torch.device, stream: int = 0) -> Tensor:
        """32 random bits for each of the part's elements from `start` to `stop`. `stream`: 0 for moments, 1 for the master."""
        key = self.key(step) if stream == 0 else _mix_number(self.key(step) + stream)
        return _mix(self.indices(start, stop, device) ^ _signed(key))


def _mix(x: Tensor) -> Tensor:
    """Wellons' hash `lowbias32`, in place. Shifts of int32 keep the sign, so it is masked."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def _mix_number(x: int) -> int:
    """The same for one number."""
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _signed(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def halves(random: Tensor) -> tuple[Tensor, Tensor]:
    """Two integers below 2^16 from each 32 random bits: for the first and for the second moment."""
    return random & 0xFFFF, (random >> 16) & 0xFFFF
