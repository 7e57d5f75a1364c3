"""What of a plan the JAX engine cannot carry out on any device. Knows no JAX: `fullshard plan` asks it too."""

from fullshard.base.errors import FullshardError
from fullshard.plan.plan import Plan, Prefetch, Wire

IDLE = {  # on JAX, by how the names of choices begin or end: why
    "prefetch": "XLA schedules gathers itself",
    "wire_": "XLA's collectives are plain, in its own memory",
    "_kernel": "XLA chooses kernels",
    "buffers": "the engine casts no buffers",
    "float8": "the engine has no float8 products",
    "moments": "the engine has no low-bit optimizer state",
    "rounding": "the engine has no low-bit optimizer state",
    "error_feedback": "no message is quantised",
}


def idle_on_jax(choice: str) -> str | None:
    """Why a choice has no effect on JAX; None if it has one."""
    return next((why for part, why in IDLE.items() if choice.startswith(part) or choice.endswith(part)), None)


def refuse_on_jax(plan: Plan) -> None:
    """Raise where JAX cannot carry the plan out."""
    precision = plan.precision
    if precision.compute == "fp16":
        raise FullshardError("precision.compute = 'fp16': the JAX engine has no loss scaling; write 'bf16'")
    if plan.prefetch != Prefetch():
        raise FullshardError(f"prefetch ({plan.prefetch}) has no effect on JAX: {IDLE['prefetch']}; leave it out")
    if plan.batch.sync == "last":
        raise FullshardError("batch.sync = 'last': on JAX gradients are reduced after every micro-batch; write 'every'")
    if precision.buffers is not None:
        raise FullshardError(f"precision.buffers = {precision.buffers!r} has no effect on JAX: {IDLE['buffers']}; leave it out")
    if precision.output is not None:
        raise FullshardError(f"precision.output = {precision.output!r}: the JAX engine casts no outputs; leave it out")
    if precision.float8 is not None:
        raise FullshardError(f"precision.float8 = {precision.float8!r} has no effect on JAX: {IDLE['float8']}; leave it out")
    if precision.low_bit:
        given = f"moments = {precision.moments!r}" if precision.moments else f"rounding = {precision.rounding!r}"
        raise FullshardError(f"precision.{given} has no effect on JAX: {IDLE['moments']}; leave it out")
    if plan.wire != Wire():
        raise FullshardError(f"wire ({plan.wire}) has no effect on JAX: {IDLE['wire_']}; leave it out")
    if not plan.kernels.is_auto:
        raise FullshardError(f"kernels ({plan.kernels}) has no effect on JAX: {IDLE['_kernel']}; leave it out")
    if plan.mesh.expert > 1:
        raise FullshardError(
            f"mesh.expert = {plan.mesh.expert}: the JAX engine has no expert axis; write 1, or use the torch engine"
        )
    for unit in plan.units:
        if not isinstance(unit.reshard, bool):
            raise FullshardError(
                f"unit {unit.name}: reshard = {unit.reshard}: on JAX parameters are kept or freed; write True or False"
            )
