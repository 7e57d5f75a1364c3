"""Every number of the planner that was fitted to measurements, with its source, by kind of device.

Published facts about hardware are in `fullshard.cluster.hardware`, and what was timed on a user's own machine is in
`fullshard.cluster.measured`. Standard library only.
"""

import dataclasses
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

from fullshard.base.text import table
from fullshard.cluster.hardware import Device

RESULTS = "benchmarks/results"
TIME_AGAIN = f"python -m benchmarks.time_again {RESULTS}/2026-11-16-turns-time-h200.json --part first"
CPU_GRID = "python benchmarks/cpu_grid.py"
MEASURE = "fullshard measure"
PUBLISHED = "pytest tests/pure/test_timeline.py -k published"
RESIDENT = "python -m benchmarks.resident_step --profile"
MEMORY_PROBE = "python -m benchmarks.memory_probe --out FOLDER"


class Fitted(float):
    """A number with its source, a file of results or a published table, and the command that fits or checks it again."""

    source: str
    check: str

    def __new__(cls, value: float, source: str = "", check: str = "") -> "Fitted":
        number = super().__new__(cls, value)
        number.source, number.check = source, check
        return number


@cache
def installed_torch() -> str:
    """Major and minor version, without the seconds that an import takes; empty where there is none."""
    try:
        return ".".join(version("torch").split(".")[:2])
    except PackageNotFoundError:
        return ""


def _about(unit: str, meaning: str) -> Any:
    """The metadata of a field of `Calibration`."""
    return MappingProxyType({"unit": unit, "meaning": meaning})


@dataclass(frozen=True)
class Calibration:
    """The fitted numbers of one kind of device. `devices`: the names of the devices that they were fitted to.

    An `op` is the host's time to issue one operation of a model, a `launch` its time to launch one bare kernel.
    """

    name: str
    devices: tuple[str, ...]
    torch: str  # the version that ran

    # Rates of kernels
    attention_forward: Fitted = field(metadata=_about("of gemm rate", "fused attention of many tokens, forward, heads of 128"))
    attention_backward: Fitted = field(metadata=_about("of gemm rate", "fused attention of many tokens, backward, heads of 128"))
    attention_short_forward: Fitted = field(metadata=_about("tokens", "at which causal attention has half its rate, forward"))
    attention_short_backward: Fitted = field(metadata=_about("tokens", "at which causal attention has half its rate, backward"))
    attention_narrow_heads: Fitted = field(metadata=_about("of attention rate", "heads of 64; those of 32 have half of it"))
    attention_wide_heads: Fitted = field(metadata=_about("of attention rate", "heads wider than 128, backward"))
    pointwise_bandwidth: Fitted = field(metadata=_about("of copy rate", "pointwise kernels of a block, where not measured"))
    chunked_loss_bandwidth: Fitted = field(metadata=_about("of copy rate", "softmax of a chunk of the loss, in place"))
    torch_loss_passes: Fitted = field(
        metadata=_about("times", "torch's softmax of a chunk of the loss, over the kernel in place")
    )
    flash_attention: Fitted = field(metadata=_about("of attention rate", "attention of kernels.attention = 'flash'"))
    rowwise_gemm: Fitted = field(metadata=_about("of float8 rate", "products of precision.float8 = 'rowwise', with their casts"))
    widening_bandwidth: Fitted = field(metadata=_about("of copy rate", "copies from bf16 to fp32"))
    foreach_bandwidth: Fitted = field(metadata=_about("of copy rate", "kernels over a list of tensors: norm, scaling"))
    adamw_bandwidth: Fitted = field(metadata=_about("of copy rate", "AdamW with clipping on the device, in one pass"))
    unaligned_gemm: Fitted = field(metadata=_about("of gemm rate", "products whose rows are not multiples of 16 bytes"))
    depthwise_conv: Fitted = field(metadata=_about("of gemm rate", "depthwise convolutions by cuDNN, channels last"))
    block_element: Fitted = field(metadata=_about("s", "an element of a sum that one block of threads adds up"))
    in_step_rate: Fitted = field(metadata=_about("of rate alone", "measured kernel rates inside a step"))
    kernel_floor: Fitted = field(metadata=_about("s", "the shortest kernel"))

    # Overlap and other ranks
    overlap_slowdown: Fitted = field(metadata=_about("share", "longer compute while a collective runs beside it"))
    rank_spread: Fitted = field(metadata=_about("of a step", "standard deviation of step time over ranks"))
    shared_dram: Fitted = field(metadata=_about("of rate alone", "PCIe and CPU AdamW at the same time, where not measured"))

    # The host's time
    remat_region: Fitted = field(metadata=_about("launches", "entering a remat region, where not measured"))
    remat_saved_tensor: Fitted = field(metadata=_about("launches", "saving a tensor there, where not measured"))
    remat_dispatch: Fitted = field(metadata=_about("launches", "an operation under selective remat, where not measured"))
    op_dispatches: Fitted = field(metadata=_about("dispatches", "an op, where not measured; a dispatch is `remat_dispatch`"))
    op_launches: Fitted = field(metadata=_about("launches", "an op of a device that is its own host"))
    unit_hooks: Fitted = field(metadata=_about("ops", "FSDP's hooks of a unit that gathers or reduces"))
    accumulate_hooks: Fitted = field(metadata=_about("ops", "FSDP's hooks of a unit that only adds up gradients"))
    single_rank_hooks: Fitted = field(metadata=_about("ops", "FSDP's hooks of a unit on one rank alone"))
    parameter_hooks: Fitted = field(metadata=_about("ops", "each parameter of a unit in its hooks, and in norm and update"))
    step_ops: Fitted = field(metadata=_about("ops", "a step beside its units: batch, norm, metrics"))
    compiled_guards: Fitted = field(metadata=_about("ops", "guards of a compiled block, forward and backward each"))
    probe_ops: Fitted = field(metadata=_about("ops", "forward and backward of the row of tiny blocks that `measure` times"))
    in_step_host: Fitted = field(metadata=_about("factor", "the host's time in a step over that in the row of tiny blocks"))
    disturbance: Fitted = field(metadata=_about("share", "of the slowdown of that row on busy cores, what a step feels"))

    # Memory
    cublas_workspace: Fitted = field(metadata=_about("B", "cuBLAS's workspace, one for each thread that multiplies"))
    multiprocessors: Fitted = field(metadata=_about("count", "multiprocessors, which size the buffers of some reductions"))

    def covers(self, device: Device) -> bool:
        """True if the numbers were fitted to this kind of device."""
        return device.name in self.devices or (device.kind == "cpu" and "cpu" in self.devices)

    def other_torch(self) -> str:
        """What to say where another torch is installed than ran; nothing where none is."""
        installed = installed_torch()
        if installed in ("", self.torch):
            return ""
        return f"fitted with torch {self.torch}; torch {installed} is installed, whose kernels may differ"

    def numbers(self) -> dict[str, Fitted]:
        """Every fitted number by its name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type is Fitted}

    def describe(self) -> str:
        """A table: a row for each number with value, unit, meaning, source and the command that checks it."""
        about = {f.name: f.metadata for f in dataclasses.fields(self)}
        rows = [
            [name, f"{number:.10g}", about[name]["unit"], about[name]["meaning"], number.source, number.check]
            for name, number in self.numbers().items()
        ]
        return table(["number", "value", "unit", "meaning", "source", "check"], rows, right=(1,))


def _from(source: str, check: str) -> Any:
    """A maker of numbers that share a source and a check."""
    return lambda value: Fitted(value, source, check)


_time = _from(f"{RESULTS}/2026-11-15-time-h200.json", TIME_AGAIN)
_measured = _from(f"{RESULTS}/2026-11-15-time-h200.json", MEASURE)
_quiet = _from(f"{RESULTS}/2026-11-16-quiet-time-h200.json", TIME_AGAIN)
_kernels = _from(f"{RESULTS}/2026-11-16-kernels-h200.json", TIME_AGAIN)
_resident = _from(f"{RESULTS}/2026-11-18-resident-h200.json", RESIDENT)
_attention = _from(f"{RESULTS}/2026-11-18-kernels-h200.json", "python -m benchmarks.kernel_rates")
_clusters = _from("published step times on 8 to 512 H100: torchtitan, MosaicML, MaxText (tests/pure/test_timeline.py)", PUBLISHED)
_layers = _from(f"{RESULTS}/2026-11-19-layers-h200.jsonl", "python -m benchmarks.layer_rates")
_cpu = _from(f"{RESULTS}/2026-11-15-time-cpu.json", CPU_GRID)
_without = _from("no such effect on a CPU", CPU_GRID)

HOPPER = Calibration(
    name="Hopper GPUs",
    devices=("h100", "h100e", "h200"),
    torch="2.11",
    attention_forward=_layers(0.78),
    attention_backward=_layers(0.7),
    attention_short_forward=_layers(600.0),
    attention_short_backward=_layers(950.0),
    attention_narrow_heads=_layers(0.77),
    attention_wide_heads=_layers(0.71),
    pointwise_bandwidth=Fitted(0.55, "assumed; published step times agree with it (tests/pure/test_timeline.py)", PUBLISHED),
    chunked_loss_bandwidth=_resident(0.74),
    torch_loss_passes=_resident(13.0),
    flash_attention=_attention(0.6),
    rowwise_gemm=_resident(0.57),
    widening_bandwidth=_kernels(0.45),
    foreach_bandwidth=_kernels(0.84),
    adamw_bandwidth=_resident(0.85),
    unaligned_gemm=_time(0.16),
    depthwise_conv=_layers(0.0115),
    block_element=_layers(0.8e-9),
    in_step_rate=_time(0.93),
    kernel_floor=_time(2e-6),
    overlap_slowdown=_clusters(0.4),
    rank_spread=_clusters(0.015),
    shared_dram=Fitted(0.85, f"{RESULTS}/2026-11-15-homes-h200.json", MEASURE),
    remat_region=_measured(20.0),
    remat_saved_tensor=_measured(2.2),
    remat_dispatch=_measured(2.2),
    op_dispatches=Fitted(1.16, f"{RESULTS}/2026-11-16-blind-time-h200.json", MEASURE),
    op_launches=_cpu(3.0),
    unit_hooks=_quiet(50.0),
    accumulate_hooks=_quiet(36.0),
    single_rank_hooks=_quiet(42.0),
    parameter_hooks=_quiet(1.4),
    step_ops=_quiet(193.0),
    compiled_guards=_quiet(11.0),
    probe_ops=_quiet(624.0),
    in_step_host=_quiet(1.22),
    disturbance=_quiet(0.55),
    cublas_workspace=Fitted(32 << 20, "aten/src/ATen/cuda/CUDABlas.cpp of torch 2.11", MEMORY_PROBE),
    multiprocessors=Fitted(132, "NVIDIA's datasheets of H100 and H200", MEMORY_PROBE),
)

# Numbers that are not given again are those of Hopper GPUs.
CPU = replace(
    HOPPER,
    name="CPUs",
    devices=("cpu",),
    torch="2.13",
    attention_forward=_cpu(0.7),
    attention_backward=_cpu(0.6),
    attention_short_forward=_without(0.0),
    attention_short_backward=_without(0.0),
    attention_narrow_heads=_cpu(0.78),
    attention_wide_heads=_without(1.0),
    chunked_loss_bandwidth=_without(1.0),
    widening_bandwidth=_cpu(0.45),
    foreach_bandwidth=_without(1.0),
    adamw_bandwidth=_without(1.0),
    unaligned_gemm=_without(1.0),
    block_element=_without(0.0),
    in_step_rate=_without(1.0),
    kernel_floor=_without(0.0),
    overlap_slowdown=_without(0.0),
    unit_hooks=_cpu(37.0),
    accumulate_hooks=_cpu(27.0),
    single_rank_hooks=_cpu(25.0),
    parameter_hooks=_cpu(2.3),
    step_ops=_cpu(150.0),
    compiled_guards=_without(0.0),
)
CALIBRATIONS = (HOPPER, CPU)


def calibration_of(device: Device) -> Calibration:
    """The device's own calibration, or the nearest: that of Hopper GPUs for every other accelerator."""
    return CPU if device.kind == "cpu" else HOPPER
