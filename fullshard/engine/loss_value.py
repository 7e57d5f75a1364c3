"""Loss functions, on every engine: what they return, and the names that recipes have for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from fullshard.base.callables import is_callable_name, load_callable
from fullshard.base.errors import FullshardError, nearest


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch on one rank.

    `sum`: over the tokens, rows or pixels that count, with its graph. `count`: how many those are. `metrics`: more sums over
    the same count, by name, such as the number of right answers; a pair (sum, count) has a count of its own. `across_rows`:
    True if a row's loss depends on the other rows of its micro-batch, as in contrastive losses; such a loss depends on the
    size of micro-batches.
    """

    sum: Any
    count: Any
    metrics: Mapping[str, Any] = field(default_factory=dict)
    across_rows: bool = False


# Of the engine's model and a batch, any tree of its arrays. It returns a `Loss`, or a bare sum over the batch's labels.
LossFunction = Callable[[Any, Any], Any]
LossT = TypeVar("LossT")


def find_loss(name: str, known: Mapping[str, LossT], returned: str, lacks: str) -> LossT:
    """The loss that a recipe calls by this name, or `file.py:callable`. `returned`: what such a callable has to return. `lacks`:
    the beginning of the sentence that refuses a name."""
    if name in known:
        return known[name]
    if is_callable_name(name):
        return cast(LossT, load_callable(name, returned))
    shown = [n for n in known if n != "call"]
    raise FullshardError(f"{lacks} {name!r}; write {', '.join(shown)} or file.py:callable{nearest(name, shown)}")
