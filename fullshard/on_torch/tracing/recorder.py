"""Record every allocation and every kernel of a run on meta tensors, in order."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fullshard.model.costs import Action, OpKind, Phase
from fullshard.on_torch.private.torch_internals import WRAPPERS, TorchDispatchMode, inner, sole_owner, without_function_modes
from fullshard.on_torch.tracing.convolutions import KernelWork
from fullshard.on_torch.tracing.cuda_kernels import further_work, kernel_work, workspace
from fullshard.on_torch.tracing.meta_outputs import name_of, tensors_in
from fullshard.on_torch.tracing.meta_values import MetaValues

aten = torch.ops.aten
ADD, ADD_IN_PLACE = aten.add.Tensor, aten.add_.Tensor
RawEvent = tuple[Action, int, str, tuple[int, ...]]  # action, tensor number, workspace rule, sizes
# A collective's result passes through these. On CUDA they return the same memory; on meta they would allocate.
PASS_THROUGH = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}
NO_TENSOR = 0  # tensors are numbered from 1
EXISTING = -1  # the number of all tensors that existed before the trace


@dataclass
class RawSection:
    """The allocations and kernels between one phase and the next."""

    phase: Phase
    unit: str
    events: list[RawEvent] = field(default_factory=list)
    ops: list[KernelWork] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # keys: the fields of `costs.Calls`


@dataclass(frozen=True)
class KernelUse:
    """The tensors that one kernel read and made. `events`: the number of events in its section after the kernel. `random`:
    whether it draws random numbers."""

    section: int
    events: int
    kind: OpKind
    read: frozenset[int]
    made: frozenset[int]
    random: bool = False


class Recorder(TorchDispatchMode):
    """A dispatch mode that follows every storage from allocation to free."""

    def __init__(self) -> None:
        super().__init__()
        self.sections = [RawSection("start", "")]
        self.roles: dict[int, tuple[str, str]] = {}  # tensor number to (unit, role)
        self.alive: dict[int, tuple[int, Any]] = {}  # storage to (tensor number, weak reference)
        self.count = 0
        self.uses: list[KernelUse] = []
        self.closed = self.in_backward = False
        self.multiplied = False  # whether the section has a matrix product
        self.values = MetaValues()

    def mark(self, phase: Phase, unit: str) -> None:
        """Begin a new section."""
        self.sections.append(RawSection(phase, unit))
        self.multiplied = False

    def add_existing(self, tensor: Tensor, value: Tensor | None = None) -> Tensor:
        """Register a tensor that existed before the trace, so that it is no allocation. `value`: its values, if the model
        may look at them."""
        storage = tensor.untyped_storage()
        self.alive[storage._cdata] = (EXISTING, storage)
        if value is not None:
            self.values.set(tensor, value)
        return tensor

    def set_role(self, tensor: Tensor, unit: str, role: str) -> None:
        """Name a tensor by its role in a unit, unless it has a role already."""
        if (number := self._number(tensor)) >= 0:
            self.roles.setdefault(number, (unit, role))

    def gradient_ready(self, tensor: Tensor, unit: str, role: str) -> None:
        """Note that a parameter's gradient is complete."""
        self.set_role(tensor, unit, role)
        self._note("ready", self._number(tensor))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch wraps a mode's calls to hide them from its compiler. Nothing is compiled here, and wrapping is slow."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if kind is not Tensor and issubclass(kind, WRAPPERS):
                return NotImplemented  # the wrapper dispatches again with its inner tensor
        with without_function_modes():
            return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = name_of(func)
        if name in PASS_THROUGH:
            return args[0]
        if self.in_backward and _accumulates_in_place(func, args):
            func, name = ADD_IN_PLACE, "aten::add_"
        inputs = tensors_in(args) + tensors_in(kwargs) if kwargs else tensors_in(args)
        out = self.values.call(func, args, kwargs, inputs)
        outputs = [t for t in tensors_in(out) if not isinstance(t, WRAPPERS)]
        self._record(name, args, inputs, outputs, torch.Tag.nondeterministic_seeded in func.tags)
        return out

    def _record(self, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor], random: bool) -> None:
        """Note the allocations, the work and the workspace of one operator call."""
        fresh = [t for t in outputs if self._allocate(t)]
        written = fresh or ([args[0]] if name.endswith("_") and args and isinstance(args[0], Tensor) else [])
        if (done := kernel_work(name, args, written)) is not None:
            self._add_work(done)
            self.sections[-1].ops += further_work(name, args, written)
        if (temporary := workspace(name, args, outputs)) is not None:
            self.count += 1
            self._note("allocate", self.count, *temporary[1], rule=temporary[0])
            self._note("free", self.count)
        if written:
            self._add_use(done[0] if done else "pointwise", inputs, fresh, random)

    def _add_work(self, done: KernelWork) -> None:
        ops = self.sections[-1].ops
        if done[0] == "gemm" and not self.multiplied:
            self.multiplied = True
            self._note("multiply", NO_TENSOR)
        ops.append(done)

    def _add_use(self, kind: OpKind, inputs: list[Tensor], fresh: list[Tensor], random: bool) -> None:
        read = {self._number(t) for t in inputs}
        made = frozenset(self._number(t) for t in fresh)
        use = KernelUse(len(self.sections) - 1, len(self.sections[-1].events), kind, frozenset(read) - made, made, random)
        self.uses.append(use)

    def _number(self, tensor: Tensor) -> int:
        return self.alive.get(inner(tensor).untyped_storage()._cdata, (EXISTING, None))[0]

    def _allocate(self, tensor: Tensor) -> bool:
        """Note an allocation if the tensor's storage is new. Its free is noted when the storage dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive or not storage.nbytes() or not tensor.is_meta:
            return False
        self.count += 1
        self.alive[key] = (self.count, weakref.ref(storage, self._on_free(key, self.count)))
        self._note("allocate", self.count, storage.nbytes())
        return True

    def _on_free(self, key: int, number: int) -> Callable[[Any], None]:
        def free(_: Any) -> None:
            if self.alive.get(key, (None,))[0] == number:
                del self.alive[key]
            self._note("free", number)

        return free

    def _note(self, action: Action, number: int, *sizes: int, rule: str = "") -> None:
        if not self.closed:
            self.sections[-1].events.append((action, number, rule, sizes))


def _accumulates_in_place(func: Any, args: Any) -> bool:
    """True if this is autograd adding two gradients of one tensor and it may overwrite the first. Under a dispatch mode
    autograd never adds in place. A recomputed forward runs with gradients enabled, so its additions are not meant."""
    if func is not ADD or torch.is_grad_enabled() or not isinstance(args[1], Tensor):
        return False
    first, second = args[:2]
    dense = first.untyped_storage().nbytes() == first.numel() * first.element_size()
    return dense and first.shape == second.shape and first.dtype is second.dtype and sole_owner(first)
