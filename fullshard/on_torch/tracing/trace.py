"""Trace one micro-batch on meta tensors: forward and backward as FSDP would run them.

Parameters are in the compute dtype, inputs are cast when a unit is entered, and gradients are kept until the unit's
backward is done. Nothing is computed, so a model of any size can be traced on any machine.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map

from fullshard.model.description import Description
from fullshard.on_torch.loss.chunked_loss import traced_as_one_chunk
from fullshard.on_torch.loss.losses import Loss, LossFunction
from fullshard.on_torch.parallelize.remat import under_remat
from fullshard.on_torch.private.torch_internals import inner
from fullshard.on_torch.tracing.cuda_kernels import FusedKernels
from fullshard.on_torch.tracing.python_calls import counting_contexts
from fullshard.on_torch.tracing.recorder import Recorder
from fullshard.on_torch.tracing.repeated_blocks import is_skipped
from fullshard.on_torch.tracing.trace_batch import TraceBatch
from fullshard.plan.plan import Remat


def trace(
    model: nn.Module,
    description: Description,
    loss: LossFunction,
    *,
    compute: torch.dtype,
    remat: Remat,
    batch: TraceBatch,
    counting: bool = False,
    backward: bool = True,
) -> Recorder:
    """Record forward and, unless `backward` is False, backward of one micro-batch, with every block under `remat`.

    `counting`: also count the `calls` of every section. Counting keeps tensors alive a little longer, so the events of
    such a trace must not be used.
    """
    recorder = Recorder()
    with ExitStack() as stack:
        stack.enter_context(_meta_parameters(model, description, compute, recorder))
        stack.enter_context(_rematerialized(model, description, remat, recorder if counting else None))
        stack.enter_context(_unit_hooks(model, description, compute, recorder))
        stack.enter_context(traced_as_one_chunk(partial(_chunk_section, recorder)))
        factor = torch.empty((), dtype=torch.float64, device="meta")
        stack.enter_context(FusedKernels())
        stack.enter_context(recorder)
        for t, value in batch.tensors:
            recorder.add_existing(t, value)
        recorder.add_existing(factor)
        found = loss(model, batch.tree)
        value = found.sum if isinstance(found, Loss) else found
        del found
        if backward:
            recorder.in_backward = True
            (value * factor.to(value.dtype)).backward()  # as the step does
            recorder.mark("end", "")
        del value
        recorder.closed = True
    return recorder


# -- the model as FSDP runs it -------------------------------------------------------------------------------


@contextmanager
def _meta_parameters(model: nn.Module, description: Description, compute: torch.dtype, recorder: Recorder) -> Iterator[None]:
    """Inside, parameters are meta tensors in the compute dtype, and buffers meta tensors in their own dtype. Those of skipped
    blocks stay as they are: nothing computes with them."""
    owner = {p.name: u.name for u in description.units for p in u.parameters}
    modules = _computing_modules(model)
    saved = [(m, dict(m._parameters), dict(m._buffers)) for m in modules]
    used = {id(p) for m in modules for p in m._parameters.values() if p is not None}
    made: dict[int, nn.Parameter] = {}
    for name, p in model.named_parameters():
        if id(p) not in used:
            continue
        made[id(p)] = fresh = nn.Parameter(_meta_like(p, compute), requires_grad=p.requires_grad)
        recorder.add_existing(inner(fresh))
        if p.requires_grad:
            fresh.register_post_accumulate_grad_hook(_on_ready(recorder, owner[name], name))
    for module, parameters, buffers in saved:
        for key, old in parameters.items():
            if old is not None:
                module._parameters[key] = made[id(old)]
        for key, b in buffers.items():
            if b is not None:
                module._buffers[key] = recorder.add_existing(torch.empty_like(b, device="meta"))
    try:
        yield
    finally:
        for module, parameters, buffers in saved:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _computing_modules(model: nn.Module) -> list[nn.Module]:
    """All modules but those inside skipped blocks."""
    found: list[nn.Module] = []
    left = [model]
    seen = {model}
    while left:
        module = left.pop()
        found.append(module)
        if not is_skipped(module):
            fresh = [m for m in module.children() if m not in seen]
            seen.update(fresh)
            left += fresh
    return found


def _meta_like(parameter: Tensor, compute: torch.dtype) -> Tensor:
    local = torch.empty(inner(parameter).shape, dtype=compute, device="meta")
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)


def _on_ready(recorder: Recorder, unit: str, name: str) -> Callable[[Tensor], None]:
    def note(p: Tensor) -> None:
        assert p.grad is not None
        recorder.gradient_ready(p.grad, unit, f"grad:{name}")

    return note


def _rematerialized(
    model: nn.Module, description: Description, remat: Remat, counter: Recorder | None
) -> AbstractContextManager[None]:
    """Inside, every block that is not skipped is under `remat`. `counter`: where to count the Python calls that it makes."""
    blocks = [model.get_submodule(m) for u in description.units if u.kind == "block" for m in u.modules if m]
    contexts = counting_contexts(remat, lambda: counter.sections[-1].calls) if counter else None
    return under_remat([block for block in blocks if not is_skipped(block)], remat, contexts)


@contextmanager
def _chunk_section(recorder: Recorder) -> Iterator[None]:
    """A section of its own for the chunk of a loss."""
    unit = recorder.sections[-1].unit
    recorder.mark("chunk", unit)
    yield
    recorder.mark("chunked", unit)


class _UnitInputs(torch.autograd.Function):
    """Identity on a unit's inputs. Its backward runs when the gradients of all inputs are complete."""

    @staticmethod
    def forward(ctx: Any, hooks: "_UnitHooks", *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.hooks = hooks
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.hooks.backward_done(grads)
        return None, *grads


class _UnitHooks:
    """Hooks of one unit that mark its phases in the recorder, where FSDP's own hooks would run."""

    def __init__(self, unit: str, modules: list[nn.Module], compute: torch.dtype, recorder: Recorder):
        self.unit, self.modules, self.compute, self.recorder = unit, modules, compute, recorder
        self.waiting: set[nn.Module] = set()
        self.in_backward = False

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        first = not self.waiting
        if first:
            self.waiting = set(self.modules)
            self.recorder.mark("enter", self.unit)
        args, kwargs = _mapped(self._cast, (args, kwargs))
        if first:
            self.recorder.mark("forward", self.unit)
            args, kwargs = self._wrap_inputs(args, kwargs)
        return args, kwargs

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.waiting.discard(module)
        if self.waiting:
            return
        for i, t in enumerate(_needing_grad(output)):
            self.recorder.set_role(t, self.unit, f"out{i}")
            t.register_hook(self._backward_begins)
        self.recorder.mark("leave", self.unit)

    def backward_done(self, grads: tuple[Tensor, ...]) -> None:
        for i, g in enumerate(grads):
            if g is not None:
                self.recorder.set_role(g, self.unit, f"in{i}")
        self.recorder.mark("done", self.unit)

    def _backward_begins(self, grad: Tensor) -> None:
        if not self.in_backward:
            self.in_backward = True
            self.recorder.mark("backward", self.unit)

    def _cast(self, value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not self.compute
        return value.to(self.compute) if floats else value

    def _wrap_inputs(self, args: Any, kwargs: Any) -> Any:
        found = _needing_grad((args, kwargs))
        if not found:
            return args, kwargs
        wrapped = dict(zip([id(t) for t in found], _UnitInputs.apply(self, *found), strict=True))
        return _mapped(lambda t: wrapped.get(id(t), t), (args, kwargs))


def _needing_grad(tree: Any) -> list[Tensor]:
    return [t for t in _leaves(tree) if isinstance(t, Tensor) and t.requires_grad]


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's `tree_map`, which takes five times as long on tuples and dicts of tensors."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_mapped(change, part) for part in tree])
    if kind is dict:
        return {key: _mapped(change, part) for key, part in tree.items()}
    return tree_map(change, tree) if kind in SUPPORTED_NODES else change(tree)


def _leaves(tree: Any) -> list[Any]:
    """As torch's `tree_leaves`."""
    kind = type(tree)
    if kind is tuple or kind is list or kind is dict:
        return [leaf for part in (tree.values() if kind is dict else tree) for leaf in _leaves(part)]
    return tree_leaves(tree) if kind in SUPPORTED_NODES else [tree]


@contextmanager
def _unit_hooks(model: nn.Module, description: Description, compute: torch.dtype, recorder: Recorder) -> Iterator[None]:
    """Inside, every unit has its hooks, and the end of the model's forward is marked."""
    handles = []
    for unit in description.units:
        modules = [model.get_submodule(m) for m in unit.modules]
        hooks = _UnitHooks(unit.name, modules, compute, recorder)
        for module in modules:
            handles.append(module.register_forward_pre_hook(hooks.before_forward, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(hooks.after_forward))
    handles.append(model.register_forward_hook(lambda *_: recorder.mark("loss", "")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
