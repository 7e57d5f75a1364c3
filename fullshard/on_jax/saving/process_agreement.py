"""The processes of a run, as those who write a checkpoint together see them."""

import itertools
from typing import Any

from fullshard.on_jax.ranks import processes
from fullshard.ranks.agreement import RankAgreement

_numbers = itertools.count()  # every process makes its agreements in the same order, so that equal numbers belong together


class ProcessAgreement(RankAgreement):
    """All processes, under a topic of their own. `what` begins its name."""

    def __init__(self, what: str):
        self.topic = f"{what}-{next(_numbers)}"
        self.rank, self.world = processes.index(), processes.count()

    def gather(self, value: Any) -> list[Any]:
        return processes.gather(self.topic, value)
