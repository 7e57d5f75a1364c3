"""What a loss function returns, on every engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
