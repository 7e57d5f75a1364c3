"""Tensors as messages of 8 bits an element, with an fp32 scale for each block of elements.

A row of a message has the scales of its blocks, then a byte for each element (`Wire.message_bytes`). A block's scale is its
largest absolute value over the largest code. So `int8` is off by at most half a scale: absmax / 127 / 2. A value that is not
finite makes its whole block NaN, so that the step sees it. Knows no collectives, and no kernels but torch's:
`kernels/message_kernel.py` has faster ones with the same bits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fullshard.plan.choices import SCALE_BYTES
from fullshard.plan.plan import Wire
from fullshard.planner.step.quantized_wire import SLICE

CodeName = Literal["int8", "fp8"]
LARGEST = {"int8": 127.0, "fp8": 448.0}
CODES: dict[str, Any] = {"int8": torch.int8, "fp8": getattr(torch, "float8_e4m3fn", None)}
TINY = torch.finfo(torch.float32).tiny  # the smallest scale: blocks of zeros have one too


class BlockRange(NamedTuple):
    """A part of every row: its elements, their blocks, and the elements of each block."""

    elements: slice
    blocks: slice
    size: int


@dataclass
class ErrorMeter:
    """Sums the squares of quantisation errors and of what was quantised, by kind of collective, while it is `on`."""

    on: bool = False
    squares: dict[str, Tensor] = field(default_factory=dict)  # error and values

    def add(self, kind: str, squares: Tensor) -> None:
        """Add the sums of squares of errors and of values."""
        self.squares[kind] = self.squares[kind] + squares if kind in self.squares else squares


@dataclass(frozen=True)
class BlockFormat:
    """How rows of values become messages. `kind`: of the collective, for the meter."""

    code: CodeName
    wire: Wire
    kind: str = ""

    def message(self, rows: int, elements: int, device: torch.device) -> Tensor:
        """Memory for a message of so many rows."""
        return torch.empty(rows, self.wire.message_bytes(elements), dtype=torch.uint8, device=device)

    def pack(
        self, values: Tensor, residual: Tensor | None = None, meter: ErrorMeter | None = None, into: Tensor | None = None
    ) -> Tensor:
        """The message of `values`, rows × elements. `into`: its memory, new by default.

        `residual`: a message of what rounding took before. It is added to the values, and then is what rounding took now.
        """
        rows, elements = values.shape
        message, kept = self.message(rows, elements, values.device) if into is None else into, BlockFormat("int8", self.wire)
        for place in self._places(rows, elements):
            grouped = values[:, place.elements].unflatten(1, (-1, place.size))
            if residual is not None:
                grouped = grouped + kept._decode(residual, elements, place)
            self._encode(message, elements, place, grouped)
            if residual is None and not (meter and meter.on):
                continue
            lost = grouped - self._decode(message, elements, place)
            if meter and meter.on:
                meter.add(self.kind, torch.stack([t.double().square().sum() for t in (lost, grouped)]))
            if residual is not None:  # a step whose gradient is not finite is skipped, and leaves nothing behind
                kept._encode(residual, elements, place, lost.nan_to_num_(0.0, 0.0, 0.0))
        return message

    def unpack(self, message: Tensor, values: Tensor) -> None:
        """Write the values of a message into `values`, rows × elements."""
        rows, elements = values.shape
        for place in self._places(rows, elements):
            values[:, place.elements].unflatten(1, (-1, place.size)).copy_(self._decode(message, elements, place))

    def unpack_sum(self, message: Tensor, total: Tensor) -> None:
        """Write the sum over the rows of a message into `total`, added up in fp32 from the first row to the last."""
        (elements,) = total.shape
        for place in self._places(len(message), elements):
            found, *others = self._decode(message, elements, place)
            for other in others:  # `sum` would add in an order that depends on the device
                found += other
            total[place.elements].copy_(found.flatten())

    def _places(self, rows: int, elements: int) -> Iterator[BlockRange]:
        """Parts of at most SLICE elements; the last block may be shorter than the others."""
        block = self.wire.block
        whole, rest = divmod(elements, block)
        step = max(1, SLICE // (rows * block))
        for first in range(0, whole, step):
            last = min(first + step, whole)
            yield BlockRange(slice(first * block, last * block), slice(first, last), block)
        if rest:
            yield BlockRange(slice(whole * block, elements), slice(whole, whole + 1), rest)

    def _views(self, message: Tensor, elements: int, place: BlockRange) -> tuple[Tensor, Tensor]:
        """The scales (rows × blocks × 1) and codes (rows × blocks × size) of a part."""
        start = SCALE_BYTES * -(-elements // self.wire.block)
        scales, codes = message[:, :start].view(torch.float32), message[:, start : start + elements].view(CODES[self.code])
        return scales[:, place.blocks].unsqueeze(-1), codes[:, place.elements].unflatten(1, (-1, place.size))

    def _encode(self, message: Tensor, elements: int, place: BlockRange, grouped: Tensor) -> None:
        scales, codes = self._views(message, elements, place)
        largest = torch.linalg.vector_norm(grouped, math.inf, -1, keepdim=True, dtype=torch.float32)
        # Divided by a tensor: on a GPU, torch would multiply by the reciprocal of a number, and scales would have other bits.
        scales.copy_(largest.div_(torch.full_like(largest, LARGEST[self.code])).clamp_(min=TINY))
        scaled = grouped / scales  # in fp32, whatever the values are in
        codes.copy_(scaled.round_() if self.code == "int8" else scaled)

    def _decode(self, message: Tensor, elements: int, place: BlockRange) -> Tensor:
        scales, codes = self._views(message, elements, place)
        return (codes if self.code == "int8" else codes.float()) * scales
