"""Gathers and reductions of 8 bits an element, as the plan's `wire` says."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fullshard.errors import FullshardError
from fullshard.on_torch.block_quantization import CODES, BlockFormat, ErrorMeter
from fullshard.on_torch.communication import all_gather
from fullshard.on_torch.fsdp_groups import replace_collectives
from fullshard.on_torch.kernels.message_kernel import pack, unpack, unpack_sum
from fullshard.on_torch.ranks import all_reduce_sum
from fullshard.plan import Plan, Wire


def refuse_wire(wire: Wire) -> None:
    """Raise for a format that this torch has no dtype for."""
    for part in ("gather", "reduce"):
        kind = getattr(wire, part)
        if kind != "plain" and CODES[kind] is None:
            raise FullshardError(f"wire.{part} = {kind!r}: this torch has no float8_e4m3fn; write 'int8'")


def quantize_collectives(plan: Plan, units: dict[str, list[FSDPModule]]) -> ErrorMeter | None:
    """Quantise the collectives of every sharded unit. Returns the meter of their errors; None if all are plain."""
    wire = plan.wire
    if wire.is_plain:
        return None
    meter = ErrorMeter()
    for unit in plan.units:
        if unit.layout != "replicated":
            gather = QuantizedGather(wire, meter) if wire.gather != "plain" else None
            reduce = QuantizedReduce(wire, meter) if wire.reduce != "plain" else None
            replace_collectives(units[unit.name][0], gather, reduce)
    return meter


class QuantizedGather:
    """An all-gather of messages. Every rank computes with the rounded values, also of its own shard."""

    def __init__(self, wire: Wire, meter: ErrorMeter):
        assert wire.gather != "plain"
        self.format, self.meter = BlockFormat(wire.gather, wire, "gather"), meter

    def __call__(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        message = pack(self.format, shard.view(1, -1), meter=self.meter)
        ranks = group.size()
        found = self.format.message(ranks, shard.numel(), shard.device)
        all_gather(found.view(-1), message.view(-1), group)
        unpack(self.format, found, output.view(ranks, -1))


class QuantizedReduce:
    """A reduce-scatter as an all-to-all of messages, whose values each rank adds up in fp32."""

    def __init__(self, wire: Wire, meter: ErrorMeter):
        assert wire.reduce != "plain"
        self.format, self.meter, self.feedback = BlockFormat(wire.reduce, wire, "reduce"), meter, wire.error_feedback
        self.residual: Tensor | None = None

    def __call__(self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup) -> None:
        parts = gradients.view(group.size(), -1)
        if self.feedback and (self.residual is None or self.residual.shape != self._shape(parts)):
            self.residual = torch.zeros(self._shape(parts), dtype=torch.uint8, device=parts.device)
        message = pack(self.format, parts, self.residual, self.meter)
        found = torch.empty_like(message)
        dist.all_to_all_single(found, message, group=group)
        unpack_sum(self.format, found, output)

    def _shape(self, parts: Tensor) -> tuple[int, int]:
        return len(parts), self.format.wire.message_bytes(parts.size(1))


def relative_errors(meter: ErrorMeter, device: torch.device) -> dict[str, float]:
    """‖error‖ / ‖values‖ of what was quantised while the meter was on, over all ranks, by kind of collective. Collective."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the sums are on the streams of the collectives
    kinds = sorted(meter.squares)
    if not kinds:
        return {}
    totals = all_reduce_sum(torch.stack([meter.squares[kind] for kind in kinds]))
    return {kind: float((lost / values.clamp(min=1e-300)).sqrt()) for kind, (lost, values) in zip(kinds, totals, strict=True)}
