"""The costs of a model: traces at a few batch shapes, fitted by polynomials in the batch shape."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from fullshard.errors import FullshardError
from fullshard.model.costs import Costs, Trace
from fullshard.model.description import Description
from fullshard.on_torch.dtypes import PLAN_DTYPES
from fullshard.on_torch.loss import LossFunction, summed_loss
from fullshard.on_torch.loss_chunks import chunked_loss, output_head
from fullshard.on_torch.private import WRAPPERS
from fullshard.on_torch.tracing.fusion import compiled
from fullshard.on_torch.tracing.polynomials import Shape, fit_trace, fixed_trace
from fullshard.on_torch.tracing.recorder import Recorder
from fullshard.on_torch.tracing.repeated_blocks import SeveralOutputsError, signature, skip_repeated
from fullshard.on_torch.tracing.tensor_names import NamedSections, name_tensors
from fullshard.on_torch.tracing.tensor_split import part_shapes, split
from fullshard.on_torch.tracing.trace import trace
from fullshard.plan import DType, Remat

# What a model may raise for a batch shape that it does not support.
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError)
LOSSES: dict[str, LossFunction] = {"plain": summed_loss, "chunked": chunked_loss}
_CACHE: dict[object, Costs] = {}


def costs(
    model: nn.Module,
    description: Description,
    *,
    micro_batch: int,
    sequence: int,
    compute: DType = "bf16",
    tensor: Sequence[int] = (),
) -> Costs:
    """Trace the model for every loss and remat choice. The result is valid for any batch shape if the model allows it, else
    for this one. `tensor`: also trace a rank of a tensor axis of each of these sizes.

    Results are cached for the life of the process, keyed by the model's structure.
    """
    whole = _cached(model, description, (micro_batch, sequence), compute)
    parts = {}
    for ranks in tensor:
        with split(model, description, ranks) as part:
            found = _cached(part, description, (micro_batch, sequence), compute, ranks)
            parts[ranks] = replace(found, shapes=part_shapes(part))
    return replace(whole, split=parts) if parts else whole


def _cached(model: nn.Module, description: Description, shape: Shape, compute: DType, tensor: int = 1) -> Costs:
    key = (tensor, compute, signature(model), tuple((u.name, u.modules) for u in description.units))
    if key not in _CACHE:
        found = _trace_model(_Traced(model, description, compute), shape)
        if found.shape is not None:
            return found
        _CACHE[key] = found
    return _CACHE[key]


@dataclass(frozen=True)
class _Traced:
    """A model to trace."""

    model: nn.Module
    description: Description
    compute: DType

    def trace(self, loss: LossFunction, remat: Remat, shape: Shape, counting: bool = False) -> Recorder:
        dtype = PLAN_DTYPES[self.compute]
        rows, tokens = shape
        return trace(self.model, self.description, loss, compute=dtype, remat=remat, rows=rows, tokens=tokens, counting=counting)


def _trace_model(traced: _Traced, shape: Shape) -> Costs:
    """Costs for any batch shape, or for `shape` alone if the model does not allow that."""
    vocabulary = _vocabulary(traced.model)
    wanted = _choices(traced, chunked=bool(vocabulary))
    try:
        if found := _trace_shapes(_grid(traced.model), traced, wanted):
            return Costs(found, None, vocabulary)
    except MODEL_ERRORS:
        pass  # for example, the grid has more positions than the model
    try:
        return Costs(_trace_shapes([shape], traced, wanted), shape, vocabulary)
    except MODEL_ERRORS as error:
        raise FullshardError(_does_not_run(traced, shape, error)) from error


def _choices(traced: _Traced, chunked: bool) -> list[tuple[str, Remat]]:
    """The (loss, remat) pairs to trace. Blocks do not depend on the loss. So the second loss needs only one remat, unless
    the head is part of the last block's sections."""
    blocks = any(u.kind == "block" for u in traced.description.units)
    remats: list[Remat] = ["none", "selective", "full"] if blocks else ["none"]
    if not chunked:
        return [("plain", remat) for remat in remats]
    plain = remats[:1] if _head_is_a_unit(traced) else remats
    return [*[("chunked", remat) for remat in remats], *[("plain", remat) for remat in plain]]


def _trace_shapes(
    shapes: list[Shape], traced: _Traced, wanted: list[tuple[str, Remat]], skip: bool = True
) -> dict[tuple[str, str, str], Trace]:
    """The traces by (dtype, loss, remat). Empty if they are no polynomials in the shape. `skip`: skip repeated blocks."""
    dtype = "bf16" if traced.compute == "fp16" else traced.compute  # the same size and the same kernels
    made: dict[tuple[str, str, str], Trace] = {}
    skipping: AbstractContextManager[dict[str, str]] = (
        skip_repeated(traced.model, traced.description) if skip else nullcontext({})
    )
    try:
        with skipping as stand_ins:
            _warm_up(traced, shapes)
            for loss, remat in wanted:
                eager, compiled_blocks = _trace_choice(traced, stand_ins, loss, remat, shapes)
                if eager is None or compiled_blocks is None:
                    return {}
                made |= {(dtype, loss, remat): eager, (dtype, loss, f"compiled {remat}"): compiled_blocks}
    except SeveralOutputsError:
        return _trace_shapes(shapes, traced, wanted, skip=False)
    return made


def _does_not_run(traced: _Traced, shape: Shape, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{traced.description.model} does not run at {shape[0]} × {shape[1]} with parameters in {traced.compute}: {reason}"


def _warm_up(traced: _Traced, shapes: list[Shape]) -> None:
    """Fill DTensor's cache of sharding rules. A shape's first trace would otherwise record how torch derives them."""
    if any(isinstance(p, WRAPPERS) for p in traced.model.parameters()):
        for shape in shapes:
            traced.trace(summed_loss, "none", shape)


def _grid(model: nn.Module) -> list[Shape]:
    """Six shapes that determine a polynomial, and one to check it. Learned position embeddings limit the length. One row
    is left out: torch skips sums over a single row."""
    tables = sorted(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    unit = min(256, max(32, tables[0] // 4 // 32 * 32)) if len(tables) > 1 else 256  # some kernels work in tiles of 32
    return [*[(b, t * unit) for b in (2, 3) for t in (1, 2, 4)], (4, 3 * unit)]


def _vocabulary(model: nn.Module) -> int:
    """The rows of the head, if the chunked loss can use it; else 0."""
    try:
        weight = output_head(model).weight
    except FullshardError:
        return 0
    return 0 if isinstance(weight, WRAPPERS) else int(weight.shape[0])


def _head_is_a_unit(traced: _Traced) -> bool:
    """True if a unit begins with the head. A tied head belongs to the unit of the embedding instead, and its work is
    recorded in the sections of the last block."""
    head = output_head(traced.model)
    return any(head is traced.model.get_submodule(u.modules[0]) for u in traced.description.units)


def _trace_choice(
    traced: _Traced, stand_ins: dict[str, str], loss: str, remat: Remat, shapes: list[Shape]
) -> tuple[Trace | None, Trace | None]:
    """The traces with eager and with compiled blocks. None if one is no polynomial in the shape."""
    eager: dict[Shape, NamedSections] = {}
    fused: dict[Shape, NamedSections] = {}
    blocks = {u.name for u in traced.description.units if u.kind == "block"}
    calls = _count_calls(traced, loss, remat, shapes[0])
    for shape in shapes:
        recorder = traced.trace(LOSSES[loss], remat, shape)
        for section, counted in zip(recorder.sections, calls, strict=False):
            section.calls = counted
        name = partial(name_tensors, recorder, description=traced.description, stand_ins=stand_ins)
        eager[shape], fused[shape] = name(recorder.sections), name(compiled(recorder, blocks))
    if len(shapes) == 1:
        return fixed_trace(eager[shapes[0]]), fixed_trace(fused[shapes[0]])
    return fit_trace(eager), fit_trace(fused)


def _count_calls(traced: _Traced, loss: str, remat: Remat, shape: Shape) -> list[Counter[str]]:
    """The Python calls of remat in each section. They are the same for every shape."""
    if remat == "none":
        return []
    return [s.calls for s in traced.trace(LOSSES[loss], remat, shape, counting=True).sections]
