"""What XLA says about the memory and the work of a compiled step, beside what the state holds and what the planner estimates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text, count_text, table
from fullshard.model.description import Description
from fullshard.on_jax.loss.losses import LossFunction, chunked_loss, summed_loss
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.ranks.jax_devices import peak_bytes
from fullshard.on_jax.step.planned_temporaries import planned_temporaries
from fullshard.on_jax.step.traced_values import TracedValues
from fullshard.on_jax.step.train_step import traced_step
from fullshard.planner.memory.peak_memory import PeakMemory, predict

NUMBERS = 8  # bytes: learning rate and clipping limit
EXACTNESS = (  # benchmarks/results/2026-11-17-jax-memory-h200.json and that of 2026-11-18
    "The estimate was between 3% below and 6% above the peak of JAX's allocator on one H200, for 15 steps of Llama 125M to 3.6B "
    "with the chunked loss, and 40% above it with the plain one."
)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one device. `held`: of the state and the batch by kind, as their arrays tell. `arguments`, `temporaries`: of the
    compiled step, as XLA tells, in (device, host) memory. `bound`: the most temporaries on the device that the plan can need, by
    kind. `updated`: bytes of arguments that the results reuse. `flops`: of one device; the body of a loop counts once.
    `estimate`: the planner's peak, if it was asked for.
    """

    held: dict[str, int]
    arguments: tuple[int, int]
    temporaries: tuple[int, int]
    bound: dict[str, int]
    updated: int
    flops: float
    estimate: PeakMemory | None = None

    @property
    def peak(self) -> int:
        """Bytes of the device that the step needs: its arguments and temporaries."""
        return self.arguments[0] + self.temporaries[0]

    def __str__(self) -> str:
        rows = [[kind, bytes_text(n)] for kind, n in self.held.items()]
        rows += [
            ["arguments of the step", _both(self.arguments)],
            ["temporaries", _both(self.temporaries)],
            ["temporaries of the plan, at most", bytes_text(sum(self.bound.values()))],
            ["arguments and temporaries", bytes_text(self.peak)],
        ]
        text = table(["memory of a device", ""], rows, right=(1,))
        text += f"\n{count_text(self.flops)} floating-point operations on each device, those of a loop counted once"
        return text if self.estimate is None else f"{text}\n\n{_estimate_text(self.estimate, self.peak)}"


def memory_analysis(
    state: JaxState, micro_batches: Sequence[Any], *, loss: LossFunction = summed_loss, description: Description | None = None
) -> StepMemory:
    """Compile the step of these batches, and return XLA's numbers for it.

    `description`: of the same model, with costs, such as `fullshard.presets.describe(name)`; adds the planner's estimate.
    """
    estimate = None if description is None else _estimate(state, description, loss)
    traced = traced_step(state, micro_batches, loss)
    lowered = traced.lower()
    compiled = lowered.compile()
    found, work = compiled.memory_analysis(), compiled.cost_analysis()
    return StepMemory(
        held=_held(state, lowered),
        arguments=(found.argument_size_in_bytes, found.host_argument_size_in_bytes),
        temporaries=(found.temp_size_in_bytes, found.host_temp_size_in_bytes),
        bound=planned_temporaries(state, TracedValues.of(traced.jaxpr.jaxpr, len(state.params))),
        updated=found.alias_size_in_bytes + found.host_alias_size_in_bytes,
        flops=float((work[0] if isinstance(work, list) else work).get("flops", 0.0)),
        estimate=estimate,
    )


def _held(state: JaxState, lowered: Any) -> dict[str, int]:
    device, host = state.held_bytes("device"), state.held_bytes("host")
    batches = lowered.args_info[0][3]
    rows = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(batches)) // state.plan.mesh.data
    found = {f"{kind} on the device": n for kind, n in device.items()} | {
        f"{kind} on the host": n for kind, n in host.items() if n
    }
    return found | {"batch, learning rate and clipping": rows + NUMBERS}


def _estimate(state: JaxState, description: Description, loss: LossFunction) -> PeakMemory:
    if description.costs is None:
        raise FullshardError("this description has no costs; write fullshard.presets.describe(name), or describe it on torch")
    name = "chunked" if loss is chunked_loss else "plain"
    plan = replace(state.plan, compile=True)
    return predict(plan, description, loss=name, optimizer=state.optimizer, reserved=False, engine="jax")


def _both(sizes: tuple[int, int]) -> str:
    device, host = sizes
    return bytes_text(device) + (f" and {bytes_text(host)} on the host" if host else "")


def _estimate_text(estimate: PeakMemory, peak: int) -> str:
    rows = [[term, bytes_text(n)] for term, n in sorted(estimate.terms.items(), key=lambda item: -item[1])]
    rows.append(["at once", bytes_text(estimate.allocated)])
    off = estimate.allocated / peak - 1
    words = f"{abs(off):.1%} {'more' if off > 0 else 'less'} than XLA's arguments and temporaries"
    if jax.default_backend() == "cpu":
        words = "XLA's temporaries on a CPU do not compare with it"
    return f"{table(['the planner estimates', ''], rows, right=(1,))}\n{words}\n{EXACTNESS}"


def memory(state: JaxState) -> dict[str, int]:
    """Peak bytes of this process's first device since its start, by its allocator. On a CPU, the bytes that the state holds."""
    device = next(d for d in state.shardings.mesh.devices.flat if d.process_index == jax.process_index())
    peak = peak_bytes(device) if device.platform != "cpu" else {}
    return {f"memory_{kind}": nbytes for kind, nbytes in (peak or {"allocated": sum(state.held_bytes().values())}).items()}
