"""The costs of a model: traces at a few batch shapes, fitted by polynomials in the batch shape."""

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from fullshard.base.errors import FullshardError, first_line
from fullshard.base.status import say
from fullshard.model.costs import ANY_ROWS, Costs, Phase, Trace
from fullshard.model.description import Description
from fullshard.on_torch.loss.chunked_loss import ChunkedLossError, chunked_loss, output_head
from fullshard.on_torch.loss.losses import LossFunction, called_loss
from fullshard.on_torch.model.model_call import own_call
from fullshard.on_torch.private.torch_internals import WRAPPERS, inner
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES
from fullshard.on_torch.tensors.trace_errors import MODEL_ERRORS, model_line, reads_values
from fullshard.on_torch.tracing.fusion import compiled
from fullshard.on_torch.tracing.polynomials import Fits, FittedTrace, Shape
from fullshard.on_torch.tracing.recorder import Recorder
from fullshard.on_torch.tracing.repeated_blocks import SeveralOutputsError, signature, skip_repeated
from fullshard.on_torch.tracing.tensor_names import named_trace
from fullshard.on_torch.tracing.tensor_split import part_shapes, split, spread
from fullshard.on_torch.tracing.trace import trace
from fullshard.on_torch.tracing.trace_batch import ROWS, ExampleBatches, token_batch
from fullshard.plan.plan import DType, Remat, SplitRules

LOSSES: dict[str, LossFunction] = {"plain": called_loss, "chunked": chunked_loss}
LONGEST_LOOP = 256  # tokens of a model that loops over them in Python
_CACHE: dict[object, Costs] = {}


def costs(
    model: nn.Module,
    description: Description,
    *,
    micro_batch: int,
    sequence: int,
    compute: DType = "bf16",
    tensor: Sequence[int] = (),
    expert: Sequence[int] = (),
    rules: SplitRules = (),
) -> Costs:
    """Trace the model for every loss and remat choice. The result is valid for any batch shape if the model allows it, else
    for this one. `tensor`, `expert`: also trace a rank of a tensor or an expert axis of each of these sizes;
    `rules`: how a tensor axis splits modules.

    Results are cached for the life of the process, keyed by the model's structure.
    """
    shape = (micro_batch, sequence)
    traced = lambda part, axis: _cached(part, description, shape, compute, axis)
    return _with_axes(model, description, tensor, expert, rules, traced)


def example_costs(
    model: nn.Module,
    description: Description,
    example: Any,
    loss: LossFunction,
    *,
    compute: DType = "bf16",
    tensor: Sequence[int] = (),
    expert: Sequence[int] = (),
    rules: SplitRules = (),
) -> Costs:
    """Trace the model with batches like `example` and the caller's loss. The result is valid for any number of rows if the
    model allows it, else for the example's."""
    batches = ExampleBatches(example)

    def trace_part(part: nn.Module, axis: object) -> Costs:
        return _trace_model(_Traced(part, description, compute, batches, {"plain": loss}), (batches.rows, 1))

    return _with_axes(model, description, tensor, expert, rules, trace_part)


def _with_axes(
    model: nn.Module,
    description: Description,
    tensor: Sequence[int],
    expert: Sequence[int],
    rules: SplitRules,
    traced: Callable[[nn.Module, object], Costs],
) -> Costs:
    """The costs of the model, with those of a rank of each tensor and expert axis. `traced`: traces the part of one rank; its
    second argument tells axes apart."""
    whole = traced(model, None)
    parts = {}
    for ranks in tensor:
        with split(model, description, ranks, rules) as part:
            parts[ranks] = replace(traced(part, (ranks, rules)), shapes=part_shapes(part))
    spreads = {}
    for ranks in expert:
        with spread(model, description, ranks) as part:
            spreads[ranks] = traced(part, ("expert", ranks))
    return replace(whole, split=parts, spread=spreads) if parts or spreads else whole


def _cached(model: nn.Module, description: Description, shape: Shape, compute: DType, axis: object = None) -> Costs:
    key = (axis, compute, signature(model), own_call(model), tuple((u.name, u.modules) for u in description.units))
    if key not in _CACHE:
        found = _trace_model(_Traced(model, description, compute), shape)
        if found.shape is not None:
            return found
        _CACHE[key] = found
    return _CACHE[key]


@dataclass(frozen=True)
class _Traced:
    """A model to trace. `example`: its batches, if they are no tokens. `losses`: by name."""

    model: nn.Module
    description: Description
    compute: DType
    example: ExampleBatches | None = None
    losses: dict[str, LossFunction] = field(default_factory=lambda: LOSSES)

    def trace(self, loss: str, remat: Remat, shape: Shape, counting: bool = False, backward: bool = True) -> Recorder:
        dtype = PLAN_DTYPES[self.compute]
        batch = self.example.of(shape[0]) if self.example else token_batch(*shape)
        how = {"compute": dtype, "remat": remat, "batch": batch, "counting": counting, "backward": backward}
        return trace(self.model, self.description, self.losses[loss], **how)  # type: ignore[arg-type]

    def grid(self) -> list[Shape]:
        """The shapes that determine the polynomials, and a last one that checks them."""
        if self.example is None:
            return _grid(self.model)
        return [(rows, 1) for rows in ROWS] if self.example.can_grow else []


def _trace_model(traced: _Traced, shape: Shape) -> Costs:
    """Costs for any batch shape, or for `shape` alone if the model does not allow that."""
    gc.freeze()  # a trace makes many objects, and each collection would visit all those of the imported libraries
    try:
        return _trace_losses(traced, shape, 0 if traced.example else _vocabulary(traced.model))
    except ChunkedLossError:
        return _trace_losses(traced, shape, 0)
    finally:
        gc.unfreeze()


def _trace_losses(traced: _Traced, shape: Shape, vocabulary: int) -> Costs:
    """As `_trace_model`. `vocabulary`: of the head, where the chunked loss is traced, too; else 0."""
    wanted = _choices(traced, chunked=bool(vocabulary))
    about = traced.example.about(traced.model) if traced.example else None
    loops = not traced.example and _loops_over_tokens(traced)
    if loops:
        _refuse_long_loop(traced, shape[1])
    grids: list[tuple[list[Shape], Shape | None]] = [([] if loops else traced.grid(), None)]
    if not traced.example:  # any rows, with this number of tokens
        grids.append(([(rows, shape[1]) for rows in ROWS], (ANY_ROWS, shape[1])))
    for grid, holds_for in grids:
        with suppress(*MODEL_ERRORS):  # for example, the grid has more positions than the model
            if grid and (found := _trace_shapes(grid, traced, wanted)):
                return Costs(found, holds_for, vocabulary, example=about)
    try:
        return Costs(_trace_shapes([shape], traced, wanted), shape, vocabulary, example=about)
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
            fits, calls = Fits(shapes, lengths=traced.example is not None), _Calls(shapes[0])
            for number, (loss, remat) in enumerate(wanted, 1):
                say(f"tracing {number} of {len(wanted)}")
                found = _trace_choice(traced, stand_ins, loss, remat, fits, calls)
                if found is None:
                    return {}
                made |= {(dtype, loss, remat): found[0], (dtype, loss, f"compiled {remat}"): found[1]}
    except SeveralOutputsError:
        return _trace_shapes(shapes, traced, wanted, skip=False)
    return made


def _loops_over_tokens(traced: _Traced) -> bool:
    """True if the model calls kernels for each token in a Python loop, as recurrent models without fused kernels do."""
    few, more = 8, 16
    try:
        with skip_repeated(traced.model, traced.description):
            forward = partial(traced.trace, "plain", "none", backward=False)
            counts = [sum(len(s.ops) for s in forward((2, tokens)).sections) for tokens in (few, more)]
    except (*MODEL_ERRORS, SeveralOutputsError):
        return False
    return counts[1] - counts[0] >= more - few


def _refuse_long_loop(traced: _Traced, tokens: int) -> None:
    if tokens > LONGEST_LOOP:
        raise FullshardError(
            f"{traced.description.model} computes token by token in a Python loop: tracing {tokens} tokens would take minutes; "
            f"install its fused kernels, give a sequence of at most {LONGEST_LOOP}, or plan by a named strategy (fullshard plan "
            "MODEL --devices 8 --strategy zero3)"
        )


def _does_not_run(traced: _Traced, shape: Shape, error: Exception) -> str:
    reason, where = first_line(error), model_line(error)
    at = "on this example" if traced.example else f"at {shape[0]} × {shape[1]}"
    if reads_values(error):
        return (
            f"{traced.description.model} cannot be traced: {where or 'it'} reads values of tensors ({reason}); plan by a named "
            "strategy, which needs no costs, such as fs.zero3(on_torch.describe(model), devices=8)"
        )
    told = f" ({where})" if where else ""
    return f"{traced.description.model} does not run {at} with parameters in {traced.compute}: {reason}{told}"


def _warm_up(traced: _Traced, shapes: list[Shape]) -> None:
    """Fill DTensor's cache of sharding rules. A shape's first trace would otherwise record how torch derives them."""
    if any(isinstance(p, WRAPPERS) for p in traced.model.parameters()):
        for shape in shapes:
            traced.trace("plain", "none", shape)


def _grid(model: nn.Module) -> list[Shape]:
    """Six shapes that determine a polynomial, and one to check it. Learned position embeddings limit the length. One row
    is left out: torch skips sums over a single row."""
    tables = sorted(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    unit = min(256, max(32, tables[0] // 4 // 32 * 32)) if len(tables) > 1 else 256  # some kernels work in tiles of 32
    return [*[(b, t * unit) for b in (2, 3) for t in (1, 2, 4)], (4, 3 * unit)]


def _vocabulary(model: nn.Module) -> int:
    """The rows of the head, if the chunked loss can use it; else 0."""
    if own_call(model):
        return 0
    try:
        weight = output_head(model).weight
    except FullshardError:
        return 0
    return int(inner(weight).shape[0])  # a rank has a part of a head that is split


def _head_is_a_unit(traced: _Traced) -> bool:
    """True if a unit begins with the head. A tied head belongs to the unit of the embedding instead, and its work is
    recorded in the sections of the last block."""
    head = output_head(traced.model)
    return any(head is traced.model.get_submodule(u.modules[0]) for u in traced.description.units)


def _trace_choice(
    traced: _Traced, stand_ins: dict[str, str], loss: str, remat: Remat, fits: Fits, calls: "_Calls"
) -> tuple[Trace, Trace] | None:
    """The traces with eager and with compiled blocks. None if one is no polynomial in the shape."""
    recorders: dict[Shape, Recorder] = {}
    fitted: FittedTrace | None = None
    for shapes in (fits.pair, fits.shapes) if fits.known else (fits.shapes,):
        recorders |= {shape: traced.trace(loss, remat, shape) for shape in shapes if shape not in recorders}
        fitted = fits.fitted({shape: recorders[shape] for shape in shapes})
        if fitted is not None:
            break
    if fitted is None:
        return None
    fitted = calls.counted(fitted, traced, loss, remat)
    blocks = {u.name for u in traced.description.units if u.kind == "block"}
    name = partial(named_trace, fitted, description=traced.description, stand_ins=stand_ins)
    return name(fitted.sections), name(compiled(fitted, blocks))


class _Calls:
    """The Python calls of remat. They are the same for every shape, and for every loss."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.known: dict[Remat, dict[tuple[Phase, str], list[Counter[str]]]] = {}

    def counted(self, fitted: FittedTrace, traced: _Traced, loss: str, remat: Remat) -> FittedTrace:
        """The trace with the calls of each section."""
        if remat == "none":
            return fitted
        if remat not in self.known:
            found = self.known[remat] = {}
            for section in traced.trace(loss, remat, self.shape, counting=True).sections:
                found.setdefault((section.phase, section.unit), []).append(section.calls)
        left = {key: iter(calls) for key, calls in self.known[remat].items()}
        none: Counter[str] = Counter()  # of sections that the other loss has not
        return replace(
            fitted, sections=[replace(s, calls=next(left.get((s.phase, s.unit), iter(())), none)) for s in fitted.sections]
        )
