"""Adam's update with moments in few bits, and with a bf16 master that is rounded stochastically. All homes use it.

Elements pass through fp32 memory in chunks: state is decoded, updated by torch's fused kernel and encoded again.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fullshard.on_torch.optimizers.adam_update import Rule, apply_rule
from fullshard.on_torch.optimizers.moment_codes import ElementRange, MomentFormat, halves, round_to_bf16
from fullshard.on_torch.tensors.shard_ranges import local_box
from fullshard.plan.plan import Precision

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}  # elements; as much as a core's cache holds, or enough for a GPU


@dataclass(frozen=True)
class LowBitRule:
    """Adam or AdamW, how moments are stored, and whether a bf16 master is rounded stochastically."""

    rule: Rule
    moments: MomentFormat
    stochastic: bool

    @classmethod
    def of(cls, precision: Precision, rule: Rule) -> "LowBitRule | None":
        """None if torch's kernels do."""
        if not precision.low_bit:
            return None
        return cls(rule, MomentFormat(precision.moment_kind), precision.rounding == "stochastic")

    def update_by_torch(
        self,
        master: Tensor,
        gradient: Tensor,
        moments: Sequence[Tensor],
        step: int,
        group: dict[str, Any],
        elements: ElementRange,
        factors: Sequence[float | Tensor] = (),
        start: int = 0,
    ) -> None:
        """Update master and stored moments in place; all are flat, and are the part's elements from `start` on. `factors`: on
        the gradient, one after the other. `step`, `group`: see `apply_rule`."""
        size = CHUNK[master.device.type]
        for low in range(0, master.numel(), size):
            part = slice(low, min(low + size, master.numel()))
            own = [self.moments.part(t, part.start, part.stop) for t in moments]
            random = elements.random(step, start + part.start, start + part.stop, master.device)
            other = None
            if self.stochastic:
                other = elements.random(step, start + part.start, start + part.stop, master.device, stream=1)
            self._update_chunk(master[part], gradient[part], own, step, group, random, other, factors)

    def _update_chunk(
        self,
        master: Tensor,
        gradient: Tensor,
        moments: Sequence[Tensor],
        step: int,
        group: dict[str, Any],
        random: Tensor,
        other: Tensor | None,
        factors: Sequence[float | Tensor],
    ) -> None:
        wide, gradient = master.float(), gradient.float()
        for factor in factors:
            gradient = gradient * factor
        values = [self.moments.decode(t, master.numel(), signed=i == 0) for i, t in enumerate(moments)]
        apply_rule(self.rule, wide, gradient, values, step, group)
        for i, (value, bits) in enumerate(zip(values, halves(random), strict=True)):
            self.moments.encode(value, bits, moments[i], signed=i == 0)
        if other is not None:
            master.copy_(round_to_bf16(wide, other & 0xFFFF))
        elif wide is not master:
            master.copy_(wide)


def element_range(name: str, parameter: Tensor) -> ElementRange:
    """Where this rank's part lies in the whole parameter. `name`: the parameter's, which is its seed."""
    shape, box = parameter.shape, local_box(parameter)
    cut = [d for d, (low, high) in enumerate(box) if high - low != shape[d]]
    last = cut[-1] if cut else 0
    assert all(d in (0, last) for d in cut), "a parameter is cut in two dims at most, one of them the first"
    inner = shape[last + 1 :].numel()
    columns, stride = (box[last][1] - box[last][0]) * inner, shape[last] * inner
    first = box[last][0] * inner
    if last:
        first += box[0][0] * shape[1:].numel()
    else:
        columns = stride  # one run
    return ElementRange(zlib.crc32(name.encode()), first, max(1, columns), max(1, stride))
