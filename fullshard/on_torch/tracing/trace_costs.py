"""From a module to its costs: traces at a few batch shapes, solved for polynomials in the shape.

Blocks that are alike are traced two or three times, not eighty: the others stand aside, and take the
second one's trace for their own.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fullshard.errors import FullshardError
from fullshard.model.costs import Action, Calls, Costs, Event, Op, Polynomial, Section, Trace, constant, evaluate, fit
from fullshard.model.description import Description
from fullshard.on_torch.dtypes import PLAN_DTYPES
from fullshard.on_torch.loss import LossFunction, summed_loss
from fullshard.on_torch.loss_chunks import chunked_loss, output_head
from fullshard.on_torch.private import WRAPPERS
from fullshard.on_torch.tracing.fusion import compiled
from fullshard.on_torch.tracing.tensor_split import part_shapes, split
from fullshard.on_torch.tracing.trace import NO_TENSOR, RawOp, RawSection, Recorder, trace
from fullshard.plan import DType, Remat

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError)
LOSSES: dict[str, LossFunction] = {"plain": summed_loss, "chunked": chunked_loss}


def costs(
    model: nn.Module,
    description: Description,
    *,
    micro_batch: int,
    sequence: int,
    compute: DType = "bf16",
    tensor: Sequence[int] = (),
) -> Costs:
    """Traces for every loss and remat choice. For any batch shape if the model allows it, else for this one. `tensor`:
    also for a rank of a tensor axis of each of these sizes.

    Remembered as long as the process lives, by what the model is made of.
    """
    whole = _known(model, description, micro_batch, sequence, compute)
    parts = {}
    for ranks in tensor:
        with split(model, description, ranks) as part:
            found = _known(part, description, micro_batch, sequence, compute, ranks)
            parts[ranks] = replace(found, shapes=part_shapes(part))
    return replace(whole, split=parts) if parts else whole


def _known(model: nn.Module, description: Description, micro_batch: int, sequence: int, compute: DType, tensor: int = 1) -> Costs:
    key = (tensor, compute, _signature(model), tuple((u.name, u.modules) for u in description.units))
    if key not in _KNOWN:
        found = _traced(model, description, micro_batch, sequence, compute)
        if found.shape is not None:
            return found
        _KNOWN[key] = found
    return _KNOWN[key]


_KNOWN: dict[object, Costs] = {}


def _traced(model: nn.Module, description: Description, micro_batch: int, sequence: int, compute: DType) -> Costs:
    remats: list[Remat] = ["none", "selective", "full"] if any(u.kind == "block" for u in description.units) else ["none"]
    vocabulary = _vocabulary(model)
    wanted = [("chunked" if vocabulary else "plain", remat) for remat in remats]
    if vocabulary:  # blocks do not know the loss: one of the two is enough for them, unless the head comes with the last
        wanted += [("plain", remat) for remat in remats[: 1 if _head_is_a_unit(model, description) else None]]
    own = (micro_batch, sequence)
    for shapes in (_grid(model), [own]):
        try:
            found = _at(shapes, model, description, wanted, compute)
        except FAILURES as error:
            if len(shapes) > 1:
                continue  # a batch that the model does not take, such as one of more positions than it knows
            raise FullshardError(_does_not_run(description, own, compute, error)) from error
        if found:
            return Costs(found, None if len(shapes) > 1 else own, vocabulary)
    raise FullshardError(f"{description.model} does other things at every run; its costs cannot be traced")


def _at(
    shapes: list[tuple[int, int]],
    model: nn.Module,
    description: Description,
    wanted: list[tuple[str, Remat]],
    compute: DType,
    whole: bool = False,
) -> dict[tuple[str, str, str], Trace]:
    """The traces at these shapes; none if the shapes did not do the same things. `whole`: no block stands aside."""
    word = "bf16" if compute == "fp16" else compute  # of one size, and by the same kernels
    made: dict[tuple[str, str, str], Trace] = {}
    standing: AbstractContextManager[dict[str, str]] = nullcontext({}) if whole else _standing_aside(model, description)
    try:
        with standing as aside:
            _rehearse(model, description, compute, shapes)
            for loss, remat in wanted:
                plain, compiled = _traces(model, description, aside, loss, compute, remat, shapes)
                if plain is None or compiled is None:
                    return {}
                made |= {(word, loss, remat): plain, (word, loss, f"compiled {remat}"): compiled}
    except _SeveralTensorsError:
        return _at(shapes, model, description, wanted, compute, whole=True)
    return made


def _does_not_run(description: Description, shape: tuple[int, int], compute: DType, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{description.model} does not run at {shape[0]} × {shape[1]} with parameters in {compute}: {reason}"


def _rehearse(model: nn.Module, description: Description, compute: DType, shapes: list[tuple[int, int]]) -> None:
    """Where parameters are split, a shape's first trace also shows how torch finds out what becomes of them."""
    if any(isinstance(p, WRAPPERS) for p in model.parameters()):
        for rows, tokens in shapes:
            trace(model, description, summed_loss, compute=PLAN_DTYPES[compute], remat="none", rows=rows, tokens=tokens)


def _grid(model: nn.Module) -> list[tuple[int, int]]:
    """Shapes that determine a polynomial, and one more to check it at; within what learned positions allow. Not one
    row: sums over rows are left out there, and what does other things is no polynomial."""
    tables = sorted(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    unit = min(256, max(32, tables[0] // 4 // 32 * 32)) if len(tables) > 1 else 256  # some kernels work in tiles of 32
    return [*[(b, t * unit) for b in (2, 3) for t in (1, 2, 4)], (4, 3 * unit)]


def _vocabulary(model: nn.Module) -> int:
    """Rows of the head, if there is one that the chunked loss can use."""
    try:
        weight = output_head(model).weight
    except FullshardError:
        return 0
    return 0 if isinstance(weight, WRAPPERS) else int(weight.shape[0])


def _head_is_a_unit(model: nn.Module, description: Description) -> bool:
    """Whether the head opens a unit. A tied one is behind the embedding's door; what it does follows the last block."""
    head = output_head(model)
    return any(head is model.get_submodule(u.modules[0]) for u in description.units)


def _traces(
    model: nn.Module,
    description: Description,
    aside: dict[str, str],
    loss: str,
    compute: DType,
    remat: Remat,
    shapes: list[tuple[int, int]],
) -> list[Trace | None]:
    """The trace as it is and as compiled blocks would leave it, sizes as polynomials; None if they are none."""
    named: list[dict[tuple[int, int], Named]] = [{}, {}]
    blocks = {u.name for u in description.units if u.kind == "block"}
    calls = _calls(model, description, loss, compute, remat, shapes[0])
    for rows, tokens in shapes:
        recorder = trace(model, description, LOSSES[loss], compute=PLAN_DTYPES[compute], remat=remat, rows=rows, tokens=tokens)
        for section, counted in zip(recorder.sections, calls, strict=False):
            section.calls = counted
        for found, sections in zip(named, (recorder.sections, compiled(recorder, blocks)), strict=True):
            found[rows, tokens] = _named(recorder, sections, description, aside)
    return [_solve(found) if len(shapes) > 1 else _fixed(next(iter(found.values()))) for found in named]


def _calls(
    model: nn.Module, description: Description, loss: str, compute: DType, remat: Remat, shape: tuple[int, int]
) -> list[Counter[str]]:
    """What remat makes the host do, section by section: the same for every shape."""
    if remat == "none":
        return []
    found = trace(
        model,
        description,
        LOSSES[loss],
        compute=PLAN_DTYPES[compute],
        remat=remat,
        rows=shape[0],
        tokens=shape[1],
        counting=True,
    )
    return [s.calls for s in found.sections]


# -- blocks that are alike ---------------------------------------------------------------------------------


@contextmanager
def _standing_aside(model: nn.Module, description: Description) -> Iterator[dict[str, str]]:
    """Inside, blocks like an earlier pair compute nothing. Gives each such block's unit its example."""
    alike: dict[str, list[str]] = {}
    for unit in description.units:
        if unit.kind == "block" and len(unit.modules) == 1:
            alike.setdefault(_signature(model.get_submodule(unit.modules[0])), []).append(unit.name)
    path = {u.name: u.modules[0] for u in description.units}
    aside: dict[str, str] = {}
    handles = []
    saved: list[tuple[nn.Module, type]] = []
    for names in alike.values():
        if len(names) < 4:
            continue
        example = _Example()
        handles.append(model.get_submodule(path[names[1]]).register_forward_hook(example.see))
        handles.append(model.get_submodule(path[names[-1]]).register_forward_hook(example.see_last, with_kwargs=True))
        for name in names[2:-1]:
            module = model.get_submodule(path[name])
            saved.append((module, type(module)))
            # A class of its own: `forward` of the instance belongs to remat.
            module.__class__ = type(type(module).__name__, (type(module),), {"forward": example.forward})
            aside[name] = names[1]
    try:
        yield aside
    finally:
        for handle in handles:
            handle.remove()
        for module, kind in saved:
            module.__class__ = kind


class _SeveralTensorsError(Exception):
    """A block returns more than its activations, and what becomes of the others is not known of one that stands aside."""


class _Example:
    """How a block's output looks, and a forward that makes one like it."""

    def __init__(self) -> None:
        self.rest: tuple[Any, ...] | None = None
        self.arriving = 0
        self.passes = False  # whether the gradient goes through in one piece of memory

    def see(self, module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) and not (isinstance(output, tuple) and sum(isinstance(t, Tensor) for t in output) == 1):
            raise _SeveralTensorsError
        self.rest = output[1:] if isinstance(output, tuple) else None

    def see_last(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The last block's backward comes before those of the blocks that stand aside."""
        for t, note in ((_activation(output), self._arrives), (_activation((args, kwargs)), self._leaves)):
            if t.requires_grad:
                t.register_hook(note)

    def _arrives(self, grad: Tensor) -> None:
        self.arriving = grad.untyped_storage()._cdata

    def _leaves(self, grad: Tensor) -> None:
        self.passes = grad.untyped_storage()._cdata == self.arriving

    @property
    def forward(self) -> Any:
        example = self

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = _Aside.apply(_activation((args, kwargs)), example)
            return out if example.rest is None else (out, *example.rest)

        return forward


def _activation(tree: Any) -> Tensor:
    return next(t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point())


class _Aside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, example: _Example) -> Tensor:
        ctx.example = example
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] if ctx.example.passes else torch.empty_like(grads[0]), None


def _signature(module: nn.Module) -> str:
    """What makes two blocks alike: their parts, sizes and plain settings, but not their number."""
    rows = [repr(module)]
    for name, m in module.named_modules():
        plain = {k: v for k, v in vars(m).items() if isinstance(v, int | float | str | bool | None) and "idx" not in k}
        tensors = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in m.named_parameters(recurse=False)]
        rows.append(f"{name} {sorted(plain.items())} {tensors}")
    return "\n".join(rows)


# -- names instead of numbers -------------------------------------------------------------------------------

Named = list[tuple[RawSection, list[tuple[Action, str, str, str, tuple[int, ...]]]]]  # (action, tensor, unit, rule, sizes)


def _named(recorder: Recorder, sections: list[RawSection], description: Description, aside: dict[str, str]) -> Named:
    """Sections with every tensor by its unit and its number there, or its role; neighbours called `<` and `>`."""
    order = list(dict.fromkeys(s.unit for s in recorder.sections if s.moment == "forward"))
    names = {NO_TENSOR: ("", ""), **recorder.roles}
    counts: dict[str, int] = {}
    for section in recorder.sections:
        for action, tensor, *_ in section.events:
            if action == "allocate" and tensor not in names:
                counts[section.unit] = counts.get(section.unit, 0) + 1
                names[tensor] = (section.unit, str(counts[section.unit]))
    prefixes = {u.name: f"{u.modules[0]}." for u in description.units}
    made: Named = []
    for section in sections:
        events = [
            (action, _short(names[tensor], prefixes), _relation(section.unit, names[tensor][0], order), rule, sizes)
            for action, tensor, rule, sizes in section.events
            if tensor in names
        ]
        made.append((section, events))
    return _with_examples(made, aside)


def _short(name: tuple[str, str], prefixes: dict[str, str]) -> str:
    """Roles of parameters without the path of their unit, so that alike blocks have the same."""
    unit, role = name
    return role.replace(prefixes.get(unit, "\0"), "", 1) if role.startswith("grad:") else role


def _relation(mine: str, theirs: str, order: list[str]) -> str:
    if mine == theirs:
        return ""
    if mine in order and theirs in order and abs(order.index(mine) - order.index(theirs)) == 1:
        return "<" if order.index(theirs) < order.index(mine) else ">"
    return theirs or "/"


def _with_examples(named: Named, aside: dict[str, str]) -> Named:
    """The sections of blocks that stood aside, replaced by their example's."""
    found = {(s.moment, s.unit): (s, events) for s, events in named}
    made = []
    for section, events in named:
        if section.unit in aside:
            example, events = found[section.moment, aside[section.unit]]
            section = RawSection(section.moment, section.unit, [], example.ops, example.calls)
        made.append((section, events))
    return made


# -- polynomials -----------------------------------------------------------------------------------------------


def _fixed(named: Named) -> Trace:
    return _assemble(
        named, lambda i, j: tuple(constant(s) for s in named[i][1][j][4]), lambda i, j: _op(named[i][0].ops[j], constant)
    )


def _op(raw: RawOp, make: Any) -> Op:
    kind, flops, moved, shape = raw
    return Op(kind, make(flops), make(moved), tuple(make(s) for s in shape))


def _solve(named: dict[tuple[int, int], Named]) -> Trace | None:
    """None if the shapes did not do the same things, or sizes are no polynomials."""
    first = next(iter(named.values()))
    if any(_skeleton(other) != _skeleton(first) for other in named.values()):
        return None
    known: dict[tuple[int, ...], Polynomial] = {}

    def solve(values: tuple[int, ...]) -> Polynomial:
        if values not in known:
            known[values] = _polynomial(dict(zip(named, values, strict=True)))
        return known[values]

    def size(i: int, j: int) -> tuple[Polynomial, ...]:
        return tuple(solve(values) for values in zip(*[n[i][1][j][4] for n in named.values()], strict=True))

    def op(i: int, j: int) -> Op:
        raws = [n[i][0].ops[j] for n in named.values()]
        shape = tuple(solve(values) for values in zip(*[r[3] for r in raws], strict=True))
        return Op(raws[0][0], solve(tuple(r[1] for r in raws)), solve(tuple(r[2] for r in raws)), shape)

    try:
        return _assemble(first, size, op)
    except ValueError:
        return None


def _skeleton(named: Named) -> list[Any]:
    """What must not depend on the shape of the batch."""
    return [(s.moment, s.unit, [e[:4] for e in events], [o[0] for o in s.ops]) for s, events in named]


def _polynomial(values: dict[tuple[int, int], int]) -> Polynomial:
    """Through all values but the last, which must lie on it."""
    *grid, last = values
    found = fit({shape: values[shape] for shape in grid})
    if found is None or evaluate(found, *last) != values[last]:
        raise ValueError(f"no polynomial: {values}")
    return found


def _assemble(named: Named, size: Callable[[int, int], tuple[Polynomial, ...]], op: Callable[[int, int], Op]) -> Trace:
    sections: dict[Section, int] = {}
    template = []
    for i, (raw, events) in enumerate(named):
        made = tuple(Event(action, tensor, unit, size(i, j), rule) for j, (action, tensor, unit, rule, _) in enumerate(events))
        section = Section(made, _summed([op(i, j) for j in range(len(raw.ops))]), Calls(**raw.calls))
        template.append(sections.setdefault(section, len(sections)))
    return Trace(tuple((s.moment, s.unit) for s, _ in named), tuple(sections), tuple(template))


def _summed(ops: list[Op]) -> tuple[Op, ...]:
    """Matrix products and attention one by one, pointwise kernels together."""
    single = [o for o in ops if o.kind != "pointwise"]
    rest = [o for o in ops if o.kind == "pointwise"]
    if rest:
        flops, moved = (tuple(map(sum, zip(*[getattr(o, part) for o in rest], strict=True))) for part in ("flops", "moved"))
        single.append(Op("pointwise", flops, moved, (), len(rest)))  # type: ignore[arg-type]
    return tuple(single)
