"""Count the Python calls that remat adds on the host (`costs.Calls`)."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import noop_context_fn

from fullshard.on_torch.parallelize.remat import keep_products
from fullshard.on_torch.private.torch_internals import TorchDispatchMode, saved_tensor_hooks
from fullshard.plan.plan import Remat

CurrentCounter = Callable[[], Counter[str]]  # returns the counter of the current section


def counting_contexts(remat: Remat, counter: CurrentCounter) -> Callable[[], Any]:
    """A `context_fn` for torch's checkpoint: the contexts of `remat` for forward and recomputation, which also count."""
    make = keep_products if remat == "selective" else noop_context_fn

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        forward, recompute = make()
        return _counting(forward, remat, counter), _counting(recompute, remat, counter)

    return contexts


@contextmanager
def _counting(context: AbstractContextManager[Any], remat: Remat, counter: CurrentCounter) -> Iterator[None]:
    counter()["regions"] += 1
    pack, unpack = saved_tensor_hooks()  # checkpoint's own, which the hooks below would replace

    def count(tensor: Tensor) -> Any:
        counter()["saved"] += 1
        return pack(tensor)

    with context, saved_tensors_hooks(count, unpack):
        if remat != "selective":
            yield
            return
        with _CountDispatches(counter):
            yield


class _CountDispatches(TorchDispatchMode):
    """Counts every operation, before the mode of selective remat returns some results itself."""

    def __init__(self, counter: CurrentCounter):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counter()["dispatched"] += 1
        return func(*args, **(kwargs or {}))
