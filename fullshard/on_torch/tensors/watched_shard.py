"""Shards on the device whose masters rest elsewhere: a read waits for the unit's update, a write is refused.

The device's copy follows the master some time after a step. Whoever reads the model's parameters would see the values of
before; what is written to them would be overwritten by the next update.
"""

from collections.abc import Callable
from typing import Any

from torch import _C, Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fullshard.base.errors import FullshardError


class WatchedShard(Tensor):
    """A tensor in place of a shard, and `plain`, the shard. `update` lets work that is queued from here on see current values."""

    __torch_function__ = _C._disabled_torch_function_impl  # type: ignore[assignment]
    plain: Tensor
    update: Callable[[], None]
    sentence: str

    @staticmethod
    def make(plain: Tensor, update: Callable[[], None], sentence: str) -> "WatchedShard":
        found = Tensor._make_wrapper_subclass(
            WatchedShard, plain.size(), plain.stride(), plain.storage_offset(), dtype=plain.dtype, device=plain.device
        )
        found.plain, found.update, found.sentence = plain, update, sentence
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, named = next(iter(args), None), kwargs or {}
        if isinstance(first, WatchedShard) and func.is_view:
            found = func(first.plain, *args[1:], **named)
            views = [cls.make(t, first.update, first.sentence) for t in (found if isinstance(found, list) else [found])]
            return views if isinstance(found, list) else views[0]
        if func.overloadpacket.__name__ == "copy_" and first is args[1]:  # `load_state_dict` copies a parameter to itself
            return first
        _refuse_writes(func, args, named)
        for update in {t.update: None for t in tree_leaves((args, named)) if isinstance(t, WatchedShard)}:
            update()
        return func(*tree_map(plain_shard, args), **tree_map(plain_shard, named))


def _refuse_writes(func: Any, args: Any, named: Any) -> None:
    for i, about in enumerate(func._schema.arguments):
        if about.alias_info is None or not about.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else named.get(about.name)
        for t in tree_leaves(value):
            if isinstance(t, WatchedShard):
                raise FullshardError(t.sentence)


def plain_shard(value: Any) -> Any:
    """The shard in place of which a tensor stands; anything else itself."""
    return value.plain if isinstance(value, WatchedShard) else value


def watch_values(name: str, parameter: Any, update: Callable[[], None]) -> None:
    """Call `update` before values of a parameter's shard are read, and refuse writes. FSDP has its own reference to it."""
    sentence = (
        f"{name} cannot be written to in place, as its master has another home than the device and would overwrite it; "
        f"write inside `with state.values(changed=True) as values:`, to values[{name!r}], or use model.load_state_dict"
    )
    parameter._local_tensor = WatchedShard.make(parameter._local_tensor, update, sentence)
