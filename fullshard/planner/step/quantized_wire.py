"""What quantising a collective costs besides its message: bytes read and written, kernels, and memory for a moment.

A GPU packs and unpacks a parameter in one pass each (on_torch/communication/triton_messages.py). A CPU follows
on_torch/block_quantization.py, step by step.
"""

from dataclasses import dataclass

from fullshard.plan.choices import SCALE_BYTES
from fullshard.plan.plan import Wire, WireFormat

FLOAT = 4  # bytes of the fp32 values between steps
SLICE = 1 << 24  # elements that are quantised at a time: as much fp32 memory is needed besides the message
FUSED_BLOCK = 1 << 14  # elements of the largest block that a GPU packs in one pass
# Kernels for each parameter of a message: norm, scale and its copy, division, rounding, copy; two for each reading of a message.
PACK_KERNELS, UNPACK_KERNELS, FEEDBACK_KERNELS = 7, 2, 13


@dataclass(frozen=True)
class PassRates:
    """How fast a GPU packs, packs with feedback, unpacks, and unpacks to a sum: shares of the rate of a copy of as many bytes."""

    pack: float
    keep: float
    unpack: float
    sum: float


# On an H200, of 400 MB in bf16 and in fp32: `python -m pytest -s tests/gpu/test_wire.py -k speed`.
RATES = {"int8": PassRates(0.63, 0.42, 0.85, 0.45), "fp8": PassRates(0.46, 0.28, 0.79, 0.28)}


@dataclass(frozen=True)
class Quantization:
    """The passes of one collective. `item`: bytes of an element before and after. `feedback`: a residual is kept. `fused`: one
    kernel packs, one unpacks."""

    wire: Wire
    code: WireFormat
    item: int
    feedback: bool = False
    fused: bool = False

    def moved(self, packed: float, unpacked: float, results: float) -> float:
        """Bytes read and written to pack so many elements and to unpack so many to so many results: a gather has as many, a
        reduction those of one rank. In one pass each, as many bytes as a copy moves in that time."""
        if self.fused:
            code, rates = 1 + SCALE_BYTES / self.wire.block, RATES[self.code]
            kept, packing = (2 * code, rates.keep) if self.feedback else (0.0, rates.pack)
            unpacking = rates.unpack if results == unpacked else rates.sum
            return packed * (self.item + code + kept) / packing + (unpacked * code + results * self.item) / unpacking
        decoded, added = self._decoded, 3 * FLOAT * (unpacked - results)
        return packed * self._packed + unpacked * decoded + added + results * (FLOAT + self.item)

    @property
    def _decoded(self) -> int:
        return 1 + FLOAT + (2 * FLOAT if self.code == "fp8" else 0)  # fp8 is converted before it is scaled

    @property
    def _packed(self) -> int:
        """Bytes of an element by step: for its block's maximum, for the division, to round it, to write it."""
        found = 2 * self.item + FLOAT + (2 * FLOAT if self.code == "int8" else 0) + FLOAT + 1
        return found + (self._kept if self.feedback else 0)

    @property
    def _kept(self) -> int:
        """The same to add the residual, and to find and pack the new one."""
        add, lose, clean = 3 * FLOAT, 3 * FLOAT, 2 * FLOAT
        return 1 + FLOAT + add + self._decoded + lose + clean + (2 * FLOAT + FLOAT + 2 * FLOAT + FLOAT + 1)

    def kernels(self, parameters: int) -> int:
        """Kernels for a message of so many parameters, each of which has its own."""
        each = 2 if self.fused else PACK_KERNELS + UNPACK_KERNELS + (FEEDBACK_KERNELS if self.feedback else 0)
        return parameters * each

    def passing(self, elements: int, *, packing: bool) -> int:
        """Bytes that are needed for a moment to pack or unpack so many elements of one parameter."""
        if self.fused:
            return 0
        tensors = (3 if self.feedback else 1) if packing else (1 if self.code == "int8" else 2)
        return tensors * FLOAT * min(elements, SLICE)


def quantized_gather(wire: Wire, item: int, *, gpu: bool) -> Quantization | None:
    """The passes of a gather of elements of `item` bytes; None if it is plain."""
    return None if wire.gather == "plain" else Quantization(wire, wire.gather, item, fused=_fused(wire, gpu))


def quantized_reduce(wire: Wire, item: int, *, gpu: bool) -> Quantization | None:
    """The passes of a reduction; None if it is plain."""
    if wire.reduce == "plain":
        return None
    return Quantization(wire, wire.reduce, item, wire.error_feedback, _fused(wire, gpu))


def _fused(wire: Wire, gpu: bool) -> bool:
    return gpu and wire.block <= FUSED_BLOCK
