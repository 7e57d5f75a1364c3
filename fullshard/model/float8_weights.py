"""Which weights of a plan compute in float8, and which of them are gathered in it. Engine and planner both ask here.

Standard library only.
"""

from fullshard.base.errors import FullshardError
from fullshard.model.description import Tensor
from fullshard.plan.plan import Batch, Plan, Precision, Unit

GRAIN = 16  # dims of a product in float8 are multiples of it


def refuse_float8_tokens(precision: Precision, batch: Batch) -> None:
    """Raise if the tokens of a micro-batch, a dim of products in float8, do not fit."""
    tokens = batch.micro_batch * batch.sequence
    if precision.float8 is not None and not batch.dims and tokens % GRAIN:
        raise FullshardError(
            f"precision.float8 = {precision.float8!r} needs a multiple of {GRAIN} tokens in a micro-batch, not "
            f"{batch.micro_batch} × {batch.sequence} = {tokens}; change the sequence or the micro-batch"
        )


def computes_in_float8(plan: Plan, unit: Unit, parameter: Tensor) -> bool:
    """True for the trained weights of linear layers inside blocks: units of one module that are named after it. A head is
    sensitive to rounding, and a weight with two names may be read by another module."""
    if plan.precision.float8 is None or unit.modules != (unit.name,) or parameter.name == f"{unit.name}.weight":
        return False
    fits = all(size % GRAIN == 0 for size in parameter.shape)
    return fits and parameter.linear and parameter.trainable and not parameter.ties


def gathered_in_float8(plan: Plan, unit: Unit, parameter: Tensor) -> bool:
    """True for weights with one scale that are sharded evenly and rest on the device: the scale is known before the gather.
    FSDP cannot keep a part of such a weight in groups of `reshard` ranks."""
    if plan.precision.float8 != "tensorwise" or not computes_in_float8(plan, unit, parameter):
        return False
    resident = unit.home.params == unit.home.optimizer == "device"
    sharded = unit.layout in ("sharded", "optimizer") and isinstance(unit.reshard, bool) and plan.mesh.shard > 1
    return sharded and resident and parameter.shape[0] % plan.mesh.shard == 0
