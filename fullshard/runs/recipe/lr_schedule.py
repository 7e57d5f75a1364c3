"""Learning-rate schedules as functions: from a step to the factor its rate is multiplied by."""

import math
from typing import Literal

ScheduleKind = Literal["constant", "linear", "cosine", "wsd"]


def factor(step: int, steps: int, kind: ScheduleKind, *, warmup: int = 0, decay: int = 0, final: float = 0.0) -> float:
    """The factor of step `step` (from 0) of `steps`.

    All kinds rise linearly over `warmup` steps, the first of which is not zero. Then `constant` stays,
    `linear` and `cosine` fall to `final` at the last step, and `wsd` stays until the last `decay` steps and
    falls linearly over those.
    """
    if step < warmup:
        return (step + 1) / warmup
    start = max(warmup, steps - decay) if kind == "wsd" else warmup
    if kind == "constant" or step < start:
        return 1.0
    done = (step - start + 1) / max(1, steps - start)  # 1 at the last step
    shape = 0.5 * (1 + math.cos(math.pi * done)) if kind == "cosine" else 1 - done
    return final + (1 - final) * shape
