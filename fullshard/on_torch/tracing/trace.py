"""One micro-batch on meta tensors, and every allocation it makes, in order.

The model runs forward and backward as FSDP would run it: parameters in the compute dtype, inputs cast at
each unit's door, gradients kept until the unit is done. Nothing is computed, so any size runs anywhere.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from fullshard.model.costs import Action, OpKind, Phase
from fullshard.model.description import Description
from fullshard.on_torch import loss_chunks
from fullshard.on_torch.loss import LossFunction
from fullshard.on_torch.private import WRAPPERS, TorchDispatchMode, inner, sole_owner
from fullshard.on_torch.remat import apply_remat
from fullshard.on_torch.tracing.cuda_kernels import StandIns, hidden, launches, work
from fullshard.on_torch.tracing.meta_values import Shadows
from fullshard.on_torch.tracing.python_calls import tallied
from fullshard.plan import Remat

aten = torch.ops.aten


RawEvent = tuple[Action, int, str, tuple[int, ...]]  # action, tensor, rule, sizes
RawOp = tuple[OpKind, int, int, tuple[int, ...]]  # as `kernels.work` gives it
# What a collective's result goes through: the same memory, but for meta tensors, of which these would make another.
PASSING = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}
REMAT = ("forward", "_fullshard_contexts")  # what it sets on a module
NO_TENSOR = 0  # tensors count from 1


@dataclass
class RawSection:
    """What followed one moment: what happened to tensors, and the work done."""

    moment: Phase
    unit: str
    events: list[RawEvent] = field(default_factory=list)
    ops: list[RawOp] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # as `costs.Calls` names them


@dataclass(frozen=True)
class Use:
    """A kernel and the tensors it read and made; how many events its section had when it was done."""

    section: int
    events: int
    kind: OpKind
    read: frozenset[int]
    made: frozenset[int]


class Recorder(TorchDispatchMode):
    """Follows every storage from its first tensor to its last."""

    def __init__(self) -> None:
        super().__init__()
        self.sections = [RawSection("start", "")]
        self.roles: dict[int, tuple[str, str]] = {}  # tensor to (unit, role)
        self.alive: dict[int, tuple[int, Any]] = {}  # storage to (tensor, weak reference)
        self.count = 0
        self.uses: list[Use] = []
        self.closed = self.in_backward = False
        self.shadows = Shadows()

    def mark(self, moment: Phase, unit: str) -> None:
        self.sections.append(RawSection(moment, unit))

    def give(self, tensor: Tensor, value: Tensor | None = None) -> Tensor:
        """A tensor that was there before: no allocation of the trace's. `value`: what it holds, if that matters."""
        storage = tensor.untyped_storage()
        self.alive[storage._cdata] = (-1, storage)
        if value is not None:
            self.shadows.set(tensor, value)
        return tensor

    def name(self, tensor: Tensor, unit: str, role: str) -> None:
        if (found := self._number(tensor)) >= 0:
            self.roles.setdefault(found, (unit, role))

    def ready(self, tensor: Tensor, unit: str, role: str) -> None:
        self.name(tensor, unit, role)
        self._note("ready", self._number(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, WRAPPERS) for t in types):
            return NotImplemented  # they ask again for what they hold
        if func._schema.name in PASSING:
            return args[0]
        if self.in_backward and _adds_in_place(func, args):
            func = aten.add_.Tensor
        out = self.shadows.call(func, args, kwargs or {})
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and not isinstance(t, WRAPPERS)]
        fresh = [t for t in outputs if self._born(t)]
        name = func._schema.name
        written = fresh or ([args[0]] if name.endswith("_") and args and isinstance(args[0], Tensor) else [])
        if (done := work(name, args, written)) is not None:
            self._work(done)
            self.sections[-1].ops += [("pointwise", 0, 0, ())] * (launches(name) - 1)
        if (inside := hidden(name, args, outputs)) is not None:
            self.count += 1
            self._note("allocate", self.count, *inside[1], rule=inside[0])
            self._note("free", self.count)
        if written:
            self._use(done[0] if done else "pointwise", tree_leaves((args, kwargs)), fresh)
        return out

    def _work(self, done: RawOp) -> None:
        ops = self.sections[-1].ops
        if done[0] == "gemm" and not any(o[0] == "gemm" for o in ops):
            self._note("multiply", NO_TENSOR)
        ops.append(done)

    def _use(self, kind: OpKind, inputs: list[Any], fresh: list[Tensor]) -> None:
        """Remember which tensors the kernel read and made."""
        read = {self._number(t) for t in inputs if isinstance(t, Tensor)}
        made = frozenset(self._number(t) for t in fresh)
        self.uses.append(Use(len(self.sections) - 1, len(self.sections[-1].events), kind, frozenset(read) - made, made))

    def _number(self, tensor: Tensor) -> int:
        return self.alive.get(inner(tensor).untyped_storage()._cdata, (-1, None))[0]

    def _born(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive or not storage.nbytes() or not tensor.is_meta:
            return False
        self.count += 1
        self.alive[key] = (self.count, weakref.ref(storage, self._dies(key, self.count)))
        self._note("allocate", self.count, storage.nbytes())
        return True

    def _dies(self, key: int, tensor: int) -> Callable[[Any], None]:
        def die(_: Any) -> None:
            if self.alive.get(key, (None,))[0] == tensor:
                del self.alive[key]
            self._note("free", tensor)

        return die

    def _note(self, action: Action, tensor: int, *sizes: int, rule: str = "") -> None:
        if not self.closed:
            self.sections[-1].events.append((action, tensor, rule, sizes))


def _adds_in_place(func: Any, args: Any) -> bool:
    """Whether this is autograd adding two gradients of one tensor, of which it may overwrite the first. Seeing a
    dispatch mode, autograd itself would not dare to. Recomputed forwards run with gradients enabled."""
    if func is not aten.add.Tensor or torch.is_grad_enabled() or not isinstance(args[1], Tensor):
        return False
    first, second = args[:2]
    dense = first.untyped_storage().nbytes() == first.numel() * first.element_size()
    return dense and first.shape == second.shape and first.dtype is second.dtype and sole_owner(first)


def trace(
    model: nn.Module,
    description: Description,
    loss: LossFunction,
    *,
    compute: torch.dtype,
    remat: Remat,
    rows: int,
    tokens: int,
    counting: bool = False,
) -> Recorder:
    """Forward and backward of one micro-batch of `rows` × `tokens`, every block under `remat`.

    `counting`: also the `calls` of every section. What counts holds tensors a little longer, so that the events of such
    a trace are not a real run's.
    """
    recorder = Recorder()
    with ExitStack() as stack:
        stack.enter_context(_meta_parameters(model, description, compute, recorder))
        stack.enter_context(_rematerialized(model, description, remat, recorder if counting else None))
        stack.enter_context(_doors(model, description, compute, recorder))
        stack.enter_context(_chunks(recorder))
        ids = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
        batch = {"input_ids": ids, "labels": torch.empty_like(ids)}
        factor = torch.empty((), dtype=torch.float64, device="meta")
        stack.enter_context(StandIns())
        stack.enter_context(recorder)
        for t in (ids, batch["labels"], factor):
            recorder.give(t, torch.zeros(rows, tokens, dtype=torch.int64) if t is not factor else None)
        value = loss(model, batch)
        recorder.in_backward = True
        (value * factor.to(value.dtype)).backward()  # as the step does
        recorder.mark("end", "")
        del value
        recorder.closed = True
    return recorder


# -- the model as FSDP runs it -------------------------------------------------------------------------------


@contextmanager
def _meta_parameters(model: nn.Module, description: Description, compute: torch.dtype, recorder: Recorder) -> Iterator[None]:
    """Inside, parameters are meta tensors of the compute dtype, buffers meta tensors of their own."""
    owner = {p.name: u.name for u in description.units for p in u.parameters}
    saved = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    made: dict[int, nn.Parameter] = {}
    for name, p in model.named_parameters():
        made[id(p)] = fresh = nn.Parameter(_computed_with(p, compute), requires_grad=p.requires_grad)
        recorder.give(inner(fresh))
        if p.requires_grad:
            fresh.register_post_accumulate_grad_hook(_on_ready(recorder, owner[name], name))
    for module, parameters, buffers in saved:
        for key, old in parameters.items():
            if old is not None:
                module._parameters[key] = made[id(old)]
        for key, b in buffers.items():
            if b is not None:
                module._buffers[key] = recorder.give(torch.empty_like(b, device="meta"))
    try:
        yield
    finally:
        for module, parameters, buffers in saved:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _computed_with(parameter: Tensor, compute: torch.dtype) -> Tensor:
    local = torch.empty(inner(parameter).shape, dtype=compute, device="meta")
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)


def _on_ready(recorder: Recorder, unit: str, name: str) -> Callable[[Tensor], None]:
    def note(p: Tensor) -> None:
        assert p.grad is not None
        recorder.ready(p.grad, unit, f"grad:{name}")

    return note


@contextmanager
def _rematerialized(model: nn.Module, description: Description, remat: Remat, counts: Recorder | None) -> Iterator[None]:
    blocks = [model.get_submodule(m) for u in description.units if u.kind == "block" for m in u.modules if m]
    before = {m: {k: m.__dict__[k] for k in REMAT if k in m.__dict__} for m in blocks}
    for module in blocks:
        apply_remat(module, remat)
        if counts:
            module.__dict__["_fullshard_contexts"] = tallied(remat, lambda: counts.sections[-1].calls)
    try:
        yield
    finally:
        for module, attributes in before.items():
            for key in REMAT:
                module.__dict__.pop(key, None)
            module.__dict__.update(attributes)


@contextmanager
def _chunks(recorder: Recorder) -> Iterator[None]:
    """Inside, the chunked loss takes one chunk, marked: its sizes are those of a chunk of that many tokens."""
    one, budget = loss_chunks._one_chunk, loss_chunks.BUDGET

    def marked(*args: Any) -> Tensor:
        unit = recorder.sections[-1].unit
        recorder.mark("chunk", unit)
        found = one(*args)
        del args
        recorder.mark("chunked", unit)
        return found

    setattr(loss_chunks, "_one_chunk", marked)  # noqa: B010 (mypy would hold it to the signature)
    loss_chunks.BUDGET = 1 << 60
    try:
        yield
    finally:
        loss_chunks._one_chunk, loss_chunks.BUDGET = one, budget


class _Done(torch.autograd.Function):
    """At the door of a unit: its backward runs when the gradients of all inputs are there."""

    @staticmethod
    def forward(ctx: Any, door: "_Door", *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.door = door
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.door.done(grads)
        return None, *grads


class _Door:
    """The moments of one unit, told to the recorder as FSDP's hooks would see them."""

    def __init__(self, unit: str, modules: list[nn.Module], compute: torch.dtype, recorder: Recorder):
        self.unit, self.modules, self.compute, self.recorder = unit, modules, compute, recorder
        self.waiting: set[nn.Module] = set()
        self.in_backward = False

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        first = not self.waiting
        if first:
            self.waiting = set(self.modules)
            self.recorder.mark("enter", self.unit)
        args, kwargs = tree_map(self._cast, (args, kwargs))
        if first:
            self.recorder.mark("forward", self.unit)
            args, kwargs = self._watch(args, kwargs)
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.waiting.discard(module)
        if self.waiting:
            return
        for i, t in enumerate(_needing_grad(output)):
            self.recorder.name(t, self.unit, f"out{i}")
            t.register_hook(self._backward)
        self.recorder.mark("leave", self.unit)

    def done(self, grads: tuple[Tensor, ...]) -> None:
        for i, g in enumerate(grads):
            if g is not None:
                self.recorder.name(g, self.unit, f"in{i}")
        self.recorder.mark("done", self.unit)

    def _backward(self, grad: Tensor) -> None:
        if not self.in_backward:
            self.in_backward = True
            self.recorder.mark("backward", self.unit)

    def _cast(self, value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not self.compute
        return value.to(self.compute) if floats else value

    def _watch(self, args: Any, kwargs: Any) -> Any:
        found = _needing_grad((args, kwargs))
        if not found:
            return args, kwargs
        watched = dict(zip([id(t) for t in found], _Done.apply(self, *found), strict=True))
        return tree_map(lambda t: watched.get(id(t), t), (args, kwargs))


def _needing_grad(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.requires_grad]


@contextmanager
def _doors(model: nn.Module, description: Description, compute: torch.dtype, recorder: Recorder) -> Iterator[None]:
    handles = []
    for unit in description.units:
        modules = [model.get_submodule(m) for m in unit.modules]
        door = _Door(unit.name, modules, compute, recorder)
        for module in modules:
            handles.append(module.register_forward_pre_hook(door.before, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(door.after))
    handles.append(model.register_forward_hook(lambda *_: recorder.mark("loss", "")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
