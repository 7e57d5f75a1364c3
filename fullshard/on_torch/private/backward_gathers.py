"""When a unit gathers for backward: before the first of its operations, wherever its results went.

FSDP gathers before the backward of what the module returns that ran last. That output may have no gradient. Results may lie in
an object of a class of its own, or in one that the module was given, such as a cache of keys and values. If a model changes an
output in place, and that is a view, FSDP's hook is lost. Private APIs of torch's FSDP, as in `fsdp_groups`.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as _TrainingState
from torch.nn import Module
from torch.utils._pytree import tree_leaves

DEPTH = 3  # of objects in objects: a cache, its layers, their tensors


def gather_for_each_backward(modules: Sequence[Any]) -> None:
    """Let a unit gather before the backward of each result of each of its modules."""
    for module in modules:
        results = _Results(len(modules) > 1)
        module.register_forward_pre_hook(results.begin, with_kwargs=True)
        module.register_forward_hook(results.end, with_kwargs=True)


class _Results:
    """The tensors that a forward of one module computes. `several`: FSDP does not hook every output.

    A recomputation may stop before the module's end: what it was given is not held here.
    """

    def __init__(self, several: bool) -> None:
        self.several = several
        self.given: dict[int, ref[Tensor]] = {}

    def begin(self, module: Module, args: Any, kwargs: Any) -> None:
        self.given = {id(t): ref(t) for t in _tensors((args, kwargs))}

    def end(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        given, self.given = self.given, {}
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        if state._training_state is _TrainingState.PRE_BACKWARD:  # a recomputation
            return
        hooked = set() if self.several else {id(leaf) for leaf in tree_leaves(output)}
        known = [t for t in (found() for found in given.values()) if t is not None]
        bases = [t if t._base is None else t._base for t in known]

        def gather(gradient: Tensor) -> None:
            state._pre_backward(gradient)

        for t in _tensors((output, args, kwargs)):
            if not t.requires_grad or any(t is other for other in known):
                continue
            if id(t) not in hooked:
                t.register_hook(gather)
            base = t._base
            if base is not None and base.grad_fn is not None and not any(base is other for other in bases):
                base.grad_fn.register_prehook(lambda gradients: gather(gradients[0]))


def _tensors(value: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, Module | type):
            yield from _tensors(list(vars(leaf).values()), depth - 1)
