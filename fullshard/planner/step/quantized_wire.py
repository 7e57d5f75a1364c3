"""What quantising a collective costs besides its message: bytes read and written, kernels, and memory for a moment.

Follows on_torch/block_quantization.py, step by step.
"""

from dataclasses import dataclass

from fullshard.plan import Wire, WireFormat

FLOAT = 4  # bytes of the fp32 values between steps
SLICE = 1 << 24  # as in on_torch/block_quantization.py: elements that are quantised at a time
# Kernels for each message: norm, scale and its copy, division, rounding, copy; two for each reading of a message.
PACK_KERNELS, UNPACK_KERNELS, FEEDBACK_KERNELS = 7, 2, 13


@dataclass(frozen=True)
class Quantization:
    """The passes of one collective. `item`: bytes of an element before and after. `feedback`: a residual is kept."""

    wire: Wire
    code: WireFormat
    item: int
    feedback: bool = False

    def message(self, elements: int) -> int:
        return self.wire.message_bytes(elements)

    @property
    def packed(self) -> int:
        """Bytes read and written to pack an element: for its block's maximum, for the division, to round it, to write it."""
        found = 2 * self.item + FLOAT + (2 * FLOAT if self.code == "int8" else 0) + FLOAT + 1
        return found + (self._kept if self.feedback else 0)

    @property
    def _kept(self) -> int:
        """The same to add the residual, and to find and pack the new one."""
        decode = 1 + FLOAT
        add, lose, clean = 3 * FLOAT, 3 * FLOAT, 2 * FLOAT
        return decode + add + decode + lose + clean + (2 * FLOAT + FLOAT + 2 * FLOAT + FLOAT + 1)

    @property
    def unpacked(self) -> int:
        """Bytes read and written to unpack an element and copy or add it."""
        return 1 + FLOAT + FLOAT + self.item

    @property
    def kernels(self) -> int:
        return PACK_KERNELS + UNPACK_KERNELS + (FEEDBACK_KERNELS if self.feedback else 0)

    def passing(self, elements: int, *, packing: bool) -> int:
        """Bytes that are needed for a moment to pack or unpack so many elements."""
        tensors = (3 if self.feedback else 1) if packing else (1 if self.code == "int8" else 2)
        return tensors * FLOAT * min(elements, SLICE)


def quantized_gather(wire: Wire, item: int) -> Quantization | None:
    """The passes of a gather of elements of `item` bytes; None if it is plain."""
    return None if wire.gather == "plain" else Quantization(wire, wire.gather, item)


def quantized_reduce(wire: Wire, item: int) -> Quantization | None:
    """The passes of a reduction; None if it is plain."""
    return None if wire.reduce == "plain" else Quantization(wire, wire.reduce, item, wire.error_feedback)
