"""`fullshard plan MODEL --devices N`: write down the plan of a named strategy."""

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from fullshard.base.errors import FullshardError
from fullshard.commands.common import Classes, MinParams, Names, describe_model
from fullshard.model.float8_weights import refuse_float8_tokens
from fullshard.plan.choices import BLOCK
from fullshard.plan.plan import Batch, Kernels, Plan, Precision, Prefetch, Wire
from fullshard.planner.jax_limits import refuse_on_jax
from fullshard.planner.strategies import STRATEGIES, choose

Strategy = StrEnum("Strategy", {name: name for name in STRATEGIES})  # type: ignore[misc]
Remat = StrEnum("Remat", {name: name for name in ("none", "selective", "full")})  # type: ignore[misc]
Sync = StrEnum("Sync", {name: name for name in ("every", "last")})  # type: ignore[misc]
DType = StrEnum("DType", {name: name for name in ("fp32", "bf16", "fp16")})  # type: ignore[misc]
Float8 = StrEnum("Float8", {name: name for name in ("tensorwise", "rowwise")})  # type: ignore[misc]
Moments = StrEnum("Moments", {name: name for name in ("bf16", "int8")})  # type: ignore[misc]
Attention = StrEnum("Attention", {name: name for name in ("auto", "cudnn", "flash")})  # type: ignore[misc]
Kernel = StrEnum("Kernel", {name: name for name in ("auto", "fused", "torch")})  # type: ignore[misc]
WireMemory = StrEnum("WireMemory", {name: name for name in ("torch", "nccl", "symmetric")})  # type: ignore[misc]
WireFormat = StrEnum("WireFormat", {name: name for name in ("plain", "int8", "fp8")})  # type: ignore[misc]
option = partial(typer.Option, rich_help_panel="Write down the plan of a strategy")


@dataclass(frozen=True)
class StrategyOptions:
    """Write down the plan of a strategy"""

    devices: Annotated[int | None, option("--devices", metavar="N", help="How many devices the plan is for.")] = None
    strategy: Annotated[
        Strategy | None, option("--strategy", help="What is sharded, and when it is gathered.", show_default="zero3")
    ] = None
    replicate: Annotated[
        int, option("--replicate", metavar="N", help="hybrid: copies of the sharded model (nodes, usually).")
    ] = 1
    reshard: Annotated[
        int | None, option("--reshard", metavar="N", help="hpz: ranks that keep the parameters after forward.")
    ] = None
    replicate_below: Annotated[
        int, option("--replicate-below", metavar="N", help="mixed: units with fewer parameters stay whole.")
    ] = 0
    keep_whole: Annotated[list[str] | None, option("--keep-whole", metavar="UNIT", help="mixed: units that stay whole.")] = None
    tensor: Annotated[int, option("--tensor", metavar="N", help="Devices each layer is split over.")] = 1
    expert: Annotated[int, option("--expert", metavar="N", help="Devices the experts of a mixture are spread over.")] = 1
    compute: Annotated[
        DType | None, option("--compute", help="Dtype of gathered parameters and activations.", show_default="fp32")
    ] = None
    reduce: Annotated[DType | None, option("--reduce", help="Dtype of gradients on the wire.", show_default="fp32")] = None
    remat: Annotated[Remat | None, option("--remat", help="What blocks recompute in backward.", show_default="none")] = None
    remat_every: Annotated[int, option("--remat-every", metavar="K", help="Recompute every K-th block only.")] = 1
    micro_batch: Annotated[
        int | None, option("--micro-batch", metavar="N", help="Sequences a rank computes at a time.", show_default="1")
    ] = None
    accumulate: Annotated[int | None, option("--accumulate", metavar="N", help="Micro-batches in a step.", show_default="1")] = (
        None
    )
    sync: Annotated[
        Sync | None, option("--sync", help="Reduce gradients after every micro-batch, or the last only.", show_default="every")
    ] = None
    prefetch: Annotated[
        int | None, option("--prefetch", metavar="N", help="Units gathered ahead, forward and backward.", show_default="1")
    ] = None
    prefetch_forward: Annotated[
        int | None,
        option("--prefetch-forward", metavar="N", help="Units gathered ahead in forward.", show_default="as --prefetch"),
    ] = None
    prefetch_backward: Annotated[
        int | None,
        option("--prefetch-backward", metavar="N", help="Units gathered ahead in backward.", show_default="as --prefetch"),
    ] = None
    compile: Annotated[bool, option("--compile", help="Compile each block.")] = False
    output_dtype: Annotated[DType | None, option("--output-dtype", help="Dtype that units cast their outputs to.")] = None
    buffers: Annotated[DType | None, option("--buffers", help="Dtype of floating-point buffers.")] = None
    float8: Annotated[Float8 | None, option("--float8", help="Linear layers of blocks multiply in float8.")] = None
    moments: Annotated[Moments | None, option("--moments", help="Low-bit moments of Adam.", show_default="the master's")] = None
    wire_gather: Annotated[WireFormat | None, option("--wire-gather", help="How parameters travel.", show_default="plain")] = None
    wire_reduce: Annotated[WireFormat | None, option("--wire-reduce", help="How gradients travel.", show_default="plain")] = None
    wire_block: Annotated[int, option("--wire-block", metavar="N", help="Elements that share a scale on the wire.")] = BLOCK
    wire_memory: Annotated[WireMemory | None, option("--wire-memory", help="Memory of collectives.", show_default="torch")] = None
    error_feedback: Annotated[bool, option("--error-feedback", help="Add what rounding took to later gradients.")] = False
    attention_kernel: Annotated[
        Attention | None, option("--attention-kernel", help="Backend of attention.", show_default="auto")
    ] = None
    loss_kernel: Annotated[Kernel | None, option("--loss-kernel", help="Of the chunked loss.", show_default="auto")] = None
    update_kernel: Annotated[Kernel | None, option("--update-kernel", help="Of clipping and Adam.", show_default="auto")] = None

    def given(self) -> dict[str, object]:
        """The options that are set, by the names of their fields."""
        return _given(self, besides="devices")


@dataclass(frozen=True)
class UnitOptions:
    """Units by hand"""

    classes: Classes = None
    names: Names = None
    min_params: MinParams = 0

    def given(self) -> dict[str, object]:
        """The options that are set, by the names that the command line has for them."""
        return {"class" if name == "classes" else name: value for name, value in _given(self).items()}


def _given(options: Any, besides: str = "") -> dict[str, object]:
    """The fields of a group of options that are not at their defaults."""
    found = {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) != f.default}
    return {name: value for name, value in found.items() if name != besides}


def refuse_beside_cluster(strategy: StrategyOptions, units: UnitOptions) -> None:
    """Raise for options that a search would not heed, with what to write instead."""
    from fullshard.planner.search.plan_space import FIXABLE

    for name, value in (strategy.given() | units.given()).items():
        text = str(value).lower() if isinstance(value, bool) else value
        instead = f"--fix {name}={text}" if name in FIXABLE else "--devices in its place, or leave it out"
        raise FullshardError(f"{spell_option(name)} has no effect with --cluster; write {instead}")


def strategy_plan(model: str, sequence: int, options: StrategyOptions, units: UnitOptions, engine: str = "torch") -> Plan:
    """The plan that the options describe, of a model of this engine."""
    o = options
    assert o.devices is not None
    made = choose(
        str(o.strategy or "zero3"),
        describe_model(model, units.classes, units.names, units.min_params, o.expert > 1, engine=engine),
        devices=o.devices,
        tensor=o.tensor,
        expert=o.expert,
        replicate=o.replicate,
        reshard=o.reshard,
        replicate_below=o.replicate_below,
        keep_whole=o.keep_whole or [],
        spell=spell_option,
        precision=_precision(o),
        batch=Batch(_or(o.micro_batch, 1), sequence, _or(o.accumulate, 1), str(o.sync or "every")),  # type: ignore[arg-type]
        prefetch=_prefetch(o),
        wire=_wire(o),
        kernels=Kernels(*(str(k or "auto") for k in (o.attention_kernel, o.loss_kernel, o.update_kernel))),  # type: ignore[arg-type]
        remat=str(o.remat or "none"),
        remat_every=o.remat_every,
        compile=o.compile,
    )
    if engine == "jax":
        refuse_on_jax(made)
    refuse_float8_tokens(made.precision, made.batch)
    return made


def _precision(o: StrategyOptions) -> Precision:
    given = (("output", o.output_dtype), ("buffers", o.buffers), ("float8", o.float8), ("moments", o.moments))
    more = {name: str(kind) for name, kind in given if kind}
    return Precision(compute=str(o.compute or "fp32"), reduce=str(o.reduce or "fp32"), **more)  # type: ignore[arg-type]


def _prefetch(o: StrategyOptions) -> Prefetch:
    if None not in (o.prefetch, o.prefetch_forward, o.prefetch_backward):
        raise FullshardError("--prefetch has no effect beside --prefetch-forward and --prefetch-backward; leave it out")
    both = _or(o.prefetch, 1)
    return Prefetch(_or(o.prefetch_forward, both), _or(o.prefetch_backward, both))


def _or(given: int | None, otherwise: int) -> int:
    """0 is given, and wrong."""
    return otherwise if given is None else given


def _wire(o: StrategyOptions) -> Wire:
    gather, reduce, memory = str(o.wire_gather or "plain"), str(o.wire_reduce or "plain"), str(o.wire_memory or "torch")
    return Wire(gather, reduce, o.wire_block, o.error_feedback, memory)  # type: ignore[arg-type]


def spell_option(field: str, *value: object) -> str:
    """A field of a strategy as an option of the command line."""
    return " ".join(["--" + field.replace("_", "-"), *map(str, value)])
