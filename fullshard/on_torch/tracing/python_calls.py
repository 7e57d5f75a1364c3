"""What remat makes the host do in Python, counted while a trace runs: `costs.Calls`."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import noop_context_fn

from fullshard.on_torch.private import TorchDispatchMode, saved_tensor_hooks
from fullshard.on_torch.remat import keep_products
from fullshard.plan import Remat

Calls = Callable[[], Counter[str]]  # where to count at this moment


def tallied(remat: Remat, calls: Calls) -> Callable[[], Any]:
    """The contexts of a block under `remat`, forward and again, which also count."""
    inside = keep_products if remat == "selective" else noop_context_fn

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        forward, again = inside()
        return _tally(forward, remat, calls), _tally(again, remat, calls)

    return contexts


@contextmanager
def _tally(context: AbstractContextManager[Any], remat: Remat, calls: Calls) -> Iterator[None]:
    calls()["regions"] += 1
    save, load = saved_tensor_hooks()  # checkpoint's own, which ours would hide

    def count(tensor: Tensor) -> Any:
        calls()["saved"] += 1
        return save(tensor)

    with context, saved_tensors_hooks(count, load):
        if remat != "selective":
            yield
            return
        with _Through(calls):
            yield


class _Through(TorchDispatchMode):
    """Sees every operation before the mode of selective remat does, which answers some of them itself."""

    def __init__(self, calls: Calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls()["dispatched"] += 1
        return func(*args, **(kwargs or {}))
