"""Packs and unpacks the messages of quantised collectives: by Triton on a GPU, if it gives torch's bits, else by torch.

Torch's functions read and write memory several times for each message. A Triton kernel reads and writes it once.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from fullshard.on_torch.communication.block_quantization import BlockFormat, CodeName, ErrorMeter
from fullshard.on_torch.tensors.usable_kernel import Found, usable_kernel
from fullshard.plan.plan import Wire
from fullshard.planner.step.quantized_wire import FUSED_BLOCK


def pack(
    how: BlockFormat, values: Tensor, residual: Tensor | None = None, meter: ErrorMeter | None = None, into: Tensor | None = None
) -> Tensor:
    """As `BlockFormat.pack`, by the best kernel there is."""
    kernel = _kernel(how, values)
    found: Tensor = (BlockFormat if kernel is None else kernel).pack(how, values, residual, meter, into)
    return found


def unpack(how: BlockFormat, message: Tensor, values: Tensor) -> None:
    """As `BlockFormat.unpack`, by the best kernel there is."""
    kernel = _kernel(how, values)
    (BlockFormat if kernel is None else kernel).unpack(how, message, values)


def unpack_sum(how: BlockFormat, message: Tensor, total: Tensor) -> None:
    """As `BlockFormat.unpack_sum`, by the best kernel there is."""
    kernel = _kernel(how, total)
    (BlockFormat if kernel is None else kernel).unpack_sum(how, message, total)


def _kernel(how: BlockFormat, values: Tensor) -> ModuleType | None:
    return find_messages(how.code, how.wire.block)[0] if values.is_cuda and how.wire.block <= FUSED_BLOCK else None


@cache
def find_messages(code: CodeName, block: int) -> Found:
    """The module `triton_messages`, or None and the reason. `block`: at most `FUSED_BLOCK`."""

    def find() -> ModuleType | None:
        from fullshard.on_torch.communication import triton_messages

        how = BlockFormat(code, Wire(code, block=block))
        return triton_messages if triton_messages.gives_torchs_bits(how, torch.device("cuda")) else None

    return usable_kernel("messages of 8 bits", find)
