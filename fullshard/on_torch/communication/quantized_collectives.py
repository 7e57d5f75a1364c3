"""Gathers and reductions of 8 bits an element, as the plan's `wire` says."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fullshard.base.errors import FullshardError
from fullshard.on_torch.communication.block_quantization import CODES, BlockFormat, ErrorMeter
from fullshard.on_torch.communication.message_kernel import pack, unpack, unpack_sum
from fullshard.on_torch.communication.replaced_collectives import all_gather
from fullshard.on_torch.private.fsdp_groups import GatherGroup, gather_group, replace_collectives
from fullshard.on_torch.ranks.device_meshes import all_reduce_sum
from fullshard.plan.plan import Plan, Wire


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
        module = units[unit.name][0]
        own = gather_group(module)
        if unit.layout != "replicated" and own is not None:
            gather = QuantizedGather(wire, meter, own) if wire.gather != "plain" else None
            reduce = QuantizedReduce(wire, meter, own) if wire.reduce != "plain" else None
            replace_collectives(module, gather, reduce)
    return meter


class QuantizedGather:
    """An all-gather of messages. Every rank computes with the rounded values, also of its own shard."""

    def __init__(self, wire: Wire, meter: ErrorMeter, unit: GatherGroup):
        assert wire.gather != "plain"
        self.format, self.meter, self.unit = BlockFormat(wire.gather, wire, "gather"), meter, unit

    def __call__(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        # A gather of fewer ranks has larger shards of the same parameters.
        sizes = [n for _, n in self.unit.padded()]
        sizes = [n * shard.numel() // sum(sizes) for n in sizes]
        message = _pack(self.format, shard.view(1, -1), sizes, self.meter)
        found = message.new_empty(group.size(), message.size(1))
        all_gather(found.view(-1), message.view(-1), group)
        for part, values in _parameters(self.format, found, output.view(group.size(), -1), sizes):
            unpack(self.format, part, values)


class QuantizedReduce:
    """A reduce-scatter as an all-to-all of messages, whose values each rank adds up in fp32."""

    def __init__(self, wire: Wire, meter: ErrorMeter, unit: GatherGroup):
        assert wire.reduce != "plain"
        self.format, self.meter, self.unit = BlockFormat(wire.reduce, wire, "reduce"), meter, unit
        self.feedback = wire.error_feedback
        self.residual: Tensor | None = None

    def __call__(self, output: Tensor, gradients: Tensor, group: dist.ProcessGroup) -> None:
        parts = gradients.view(group.size(), -1)
        sizes = [n for parameter, n in self.unit.padded() if parameter.requires_grad]
        if sum(sizes) != parts.size(1):  # a parameter took no part in the loss; FSDP does not say which
            sizes = [parts.size(1)]
        if self.feedback and (self.residual is None or self.residual.shape != self._shape(parts, sizes)):
            self.residual = torch.zeros(self._shape(parts, sizes), dtype=torch.uint8, device=parts.device)
        message = _pack(self.format, parts, sizes, self.meter, self.residual)
        found = torch.empty_like(message)
        dist.all_to_all_single(found, message, group=group)
        for part, values in _parameters(self.format, found, output.view(1, -1), sizes):
            unpack_sum(self.format, part, values[0])

    def _shape(self, parts: Tensor, sizes: list[int]) -> tuple[int, int]:
        return len(parts), self.format.wire.message_bytes(*sizes)


def _pack(how: BlockFormat, values: Tensor, sizes: list[int], meter: ErrorMeter, residual: Tensor | None = None) -> Tensor:
    """The message of parameters of these sizes, rows × elements: no block has elements of two. A norm's weights are near 1 and
    those of a linear layer near 0, so one scale for both would round the latter away."""
    message = values.new_empty(len(values), how.wire.message_bytes(*sizes), dtype=torch.uint8)
    kept: Sequence[Tensor | None] = [None] * len(sizes) if residual is None else _columns(how, residual, sizes)
    for (into, part), rest in zip(_parameters(how, message, values, sizes), kept, strict=True):
        pack(how, part, rest, meter, into)
    return message


def _parameters(how: BlockFormat, message: Tensor, values: Tensor, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each parameter its columns of a message and of the values."""
    return zip(_columns(how, message, sizes), values.split(sizes, 1), strict=True)


def _columns(how: BlockFormat, message: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Each parameter's columns of a message."""
    return message.split([how.wire.message_bytes(n) for n in sizes], 1)


def relative_errors(meter: ErrorMeter, device: torch.device) -> dict[str, float]:
    """‖error‖ / ‖values‖ of what was quantised while the meter was on, over all ranks, by kind of collective. Collective."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the sums are on the streams of the collectives
    kinds = sorted(meter.squares)
    if not kinds:
        return {}
    totals = all_reduce_sum(torch.stack([meter.squares[kind] for kind in kinds]))
    return {kind: float((lost / values.clamp(min=1e-300)).sqrt()) for kind, (lost, values) in zip(kinds, totals, strict=True)}
