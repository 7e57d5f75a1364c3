"""Parameters that a model uses while the modules that own them do not run, found by one forward.

FSDP gathers a unit when one of its modules is called. A weight that another module reads, or a module that is called past its
hooks, needs a unit that is called in time.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from fullshard.base.errors import FullshardError, first_line
from fullshard.model.description import Description
from fullshard.on_torch.loss.losses import LossFunction
from fullshard.on_torch.private.torch_internals import TorchDispatchMode
from fullshard.on_torch.tensors.trace_errors import MODEL_ERRORS, model_line
from fullshard.on_torch.tracing.repeated_blocks import SeveralOutputsError, skip_repeated
from fullshard.on_torch.tracing.trace import trace
from fullshard.on_torch.tracing.trace_batch import TraceBatch

OutsideUses = Mapping[nn.Module, frozenset[int]]  # the ids of parameters inside that are used while a module does not run


def outside_uses(
    model: nn.Module, description: Description, batch: TraceBatch, loss: LossFunction, *, strict: bool, real: Any = None
) -> OutsideUses:
    """For each module, the parameters inside that a forward uses while it does not run. A model that cannot be traced has
    none, or with `strict` is an error. `real`: a batch with values, for a model that has values but cannot be traced."""
    try:
        try:
            found = _watch(model, description, batch, loss, skip_repeated(model, description))
        except (SeveralOutputsError, *MODEL_ERRORS):  # for example, skipped blocks that return what the model cannot take
            found = _watch(model, description, batch, loss, nullcontext({}))
    except MODEL_ERRORS as error:
        if not strict:
            return {}
        if real is not None and not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            return _by_module(model, _watch_real(model, real, loss))
        where = f" ({line})" if (line := model_line(error)) else ""
        raise FullshardError(
            f"{description.model} cannot be traced on this batch: {first_line(error)}{where}; build the model with values, "
            "so that it can run, or describe it without a batch"
        ) from error
    return _by_module(model, found)


def _by_module(model: nn.Module, found: Mapping[str, set[str]]) -> OutsideUses:
    ids = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    paths = dict(model.named_modules(remove_duplicate=False))
    return {paths[path]: frozenset(ids[name] for name in names) for path, names in found.items()}


def _watch_real(model: nn.Module, batch: Any, loss: LossFunction) -> dict[str, set[str]]:
    """As `_watch`, by computing the loss of the batch. Leaves buffers and random states as they were."""
    uses, buffers = _Uses(), [(b, b.clone()) for b in model.buffers()]
    try:
        with torch.random.fork_rng(), uses.watching(model):
            loss(model, batch)
    finally:
        for buffer, before in buffers:
            buffer.data.copy_(before)
    return uses.outside(model)


def _watch(
    model: nn.Module,
    description: Description,
    batch: TraceBatch,
    loss: LossFunction,
    skipping: AbstractContextManager[Mapping[str, str]],
) -> dict[str, set[str]]:
    """By module, the names of the parameters."""
    uses = _Uses()

    def watched(model: nn.Module, tree: Any) -> Any:
        with uses.watching(model):
            return loss(model, tree)

    with skipping as skipped:
        trace(model, description, watched, compute=torch.float32, remat="none", batch=batch, backward=False)
    found = uses.outside(model)
    _copy_to_skipped(found, description, skipped)
    return found


class _Uses(TorchDispatchMode):
    """Notes which modules run whenever an operation gets a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.names: dict[int, list[str]] = {}
        self.seen: set[tuple[str, frozenset[nn.Module]]] = set()
        self.chains: dict[str, list[tuple[str, nn.Module]]] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, p in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(p), []).append(name)
            parts = name.split(".")[:-1]
            self.chains[name] = [(path, modules[path]) for path in (".".join(parts[:i]) for i in range(len(parts) + 1))]
        enter = register_module_forward_pre_hook(lambda module, args: self.running.append(module))
        leave = register_module_forward_hook(self._leave, always_call=True)
        try:
            with self:
                yield
        finally:
            enter.remove()
            leave.remove()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self.running and self.running.pop() is not module:
            pass

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (names := self.names.get(id(value))):
                running = frozenset(self.running)
                self.seen.add((self._used_name(names, running), running))
        return func(*args, **(kwargs or {}))

    def _used_name(self, names: list[str], running: frozenset[nn.Module]) -> str:
        """The name under which the model uses a parameter: of a tied one, that of the modules that run."""
        depth = lambda name: sum(module in running for _, module in self.chains[name])
        return max(names, key=depth)

    def outside(self, model: nn.Module) -> dict[str, set[str]]:
        """By module, the names of parameters inside that were used while it did not run."""
        found: dict[str, set[str]] = {}
        for name, running in self.seen:
            for path, module in self.chains[name] if model in running else ():
                if module not in running:
                    found.setdefault(path, set()).add(name)
        return found


def _copy_to_skipped(outside: dict[str, set[str]], description: Description, skipped: Mapping[str, str]) -> None:
    """Give each skipped block what was found in the block that stands for it."""
    block = {u.name: u.modules[0] for u in description.units}
    for unit, stand_in in skipped.items():
        here, there = block[unit], block[stand_in]
        for path in [p for p in outside if p == there or p.startswith(f"{there}.")]:
            own = {here + name[len(there) :] for name in outside[path] if name.startswith(f"{there}.")}
            outside[here + path[len(there) :]] = own
