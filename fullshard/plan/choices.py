"""The parts of a plan: mesh, homes, precision, batch, prefetch, wire, kernels and units, immutable values that check themselves.

Standard library only.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fullshard.base.errors import FullshardError, nearest
from fullshard.base.reading import LARGEST_INTEGER

HomeName = Literal["device", "host", "disk"]
Layout = Literal["replicated", "optimizer", "sharded", "experts"]
Remat = Literal["none", "selective", "full"]
DType = Literal["fp32", "bf16", "fp16"]
Float8 = Literal["tensorwise", "rowwise"]  # how many elements share a scale
MomentKind = Literal["fp32", "bf16", "int8"]
Rounding = Literal["nearest", "stochastic"]
Sync = Literal["every", "last"]
WireFormat = Literal["plain", "int8", "fp8"]
WireMemory = Literal["torch", "nccl", "symmetric"]
AttentionKernel = Literal["auto", "cudnn", "flash"]
Kernel = Literal["auto", "fused", "torch"]
Split = Literal["output", "input", "vocabulary", "whole"]  # how the tensor axis splits a module
SplitRules = tuple[tuple[str, Split], ...]  # by pattern of module paths; the first that matches holds


BLOCK = 256  # elements with one scale, by default
SCALE_BYTES, MESSAGE_GRAIN = 4, 16  # of an fp32 scale; messages begin at multiples of the grain, so that scales are aligned


class PlanError(FullshardError):
    """A plan, or a field of one, that makes no sense."""


@dataclass(frozen=True)
class Mesh:
    """`replicate × shard × tensor` devices. `expert`: the experts of a mixture are spread over groups of so many neighbouring
    ranks of the shard axis."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for axis in ("replicate", "shard", "tensor", "expert"):
            check_positive_integer(f"mesh.{axis}", getattr(self, axis))
        if self.shard % self.expert:
            raise PlanError(f"mesh.expert = {self.expert} must divide mesh.shard = {self.shard}, whose ranks share the experts")
        if self.expert > 1 and self.tensor > 1:
            raise PlanError(
                f"mesh.expert = {self.expert} cannot be combined with mesh.tensor = {self.tensor}; write one of them as 1"
            )

    @property
    def devices(self) -> int:
        return self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """Number of ranks with different batches: ranks along the tensor axis share theirs."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        experts = f", experts over {self.expert}" if self.expert > 1 else ""
        return f"{self.replicate}×{self.shard}×{self.tensor}{experts}"


@dataclass(frozen=True)
class Home:
    """Where a unit's bytes rest between uses."""

    params: HomeName = "device"
    optimizer: HomeName = "device"
    activations: HomeName = "device"

    def __post_init__(self) -> None:
        for kind in ("params", "optimizer", "activations"):
            check_choice(f"home.{kind}", getattr(self, kind), get_args(HomeName))

    def __str__(self) -> str:
        places = (self.params, self.optimizer, self.activations)
        return places[0] if len(set(places)) == 1 else "/".join(places)


@dataclass(frozen=True)
class Precision:
    """Dtypes. `compute`: of gathered parameters and activations. `reduce`: of gradients on the wire. `master`: of the parameters
    that the optimizer updates. `output`: that every unit casts its output to, if any. `buffers`: of floating-point buffers; None
    leaves each as the model has it. `float8`: linear layers of blocks multiply in float8, with a scale for each tensor or each
    row; approximate.

    `moments`: of Adam's moments; None is the master's. `int8` has 8 bits an element and an fp32 scale for each block of 256.
    `bf16` and `int8` are approximate, and rounded stochastically. `rounding`: of a bf16 master, and of moments of its dtype.
    """

    compute: DType = "fp32"
    reduce: DType = "fp32"
    master: DType = "fp32"
    output: DType | None = None
    buffers: DType | None = None
    float8: Float8 | None = None
    moments: MomentKind | None = None
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        for part in ("compute", "reduce"):
            check_choice(f"precision.{part}", getattr(self, part), get_args(DType))
        check_choice("precision.master", self.master, ("fp32", "bf16"))
        for part in ("output", "buffers"):
            if getattr(self, part) is not None:
                check_choice(f"precision.{part}", getattr(self, part), get_args(DType))
        if self.float8 is not None:
            check_choice("precision.float8", self.float8, get_args(Float8))
            if self.compute != "bf16":
                raise PlanError(
                    f"precision.float8 = {self.float8!r} needs precision.compute = 'bf16', not {self.compute!r}, for all but "
                    "matrix products; write compute = 'bf16'"
                )
        self._check_update()

    def _check_update(self) -> None:
        if self.moments is not None:
            check_choice("precision.moments", self.moments, get_args(MomentKind))
        check_choice("precision.rounding", self.rounding, get_args(Rounding))
        if self.moments == self.master == "fp32":
            raise PlanError("precision.moments = 'fp32' has no effect with master = 'fp32'; leave it out")
        if self.rounding == "stochastic" and self.master != "bf16":
            raise PlanError(
                f"precision.rounding = 'stochastic' has no effect with master = {self.master!r}: it is for a bf16 master, and "
                "moments of 'bf16' and 'int8' are rounded so anyway; write master = 'bf16', or leave it out"
            )

    @property
    def low_bit(self) -> bool:
        """True if fullshard's own update of Adam is needed: moments apart from the master's dtype, or stochastic rounding."""
        return self.moments is not None or self.rounding == "stochastic"

    @property
    def moment_kind(self) -> MomentKind:
        return self.moments or ("bf16" if self.master == "bf16" else "fp32")

    @property
    def moment_grain(self) -> int:
        """Elements that are stored together: parameters in flat memory begin at multiples of it."""
        return BLOCK if self.moment_kind == "int8" else 1

    def moment_bytes(self, elements: int) -> int:
        """Bytes of one moment of so many elements. `int8` has whole blocks, each with its scale."""
        if self.moment_kind == "int8":
            return -(-elements // BLOCK) * (SCALE_BYTES + BLOCK)
        return elements * (4 if self.moment_kind == "fp32" else 2)

    def __str__(self) -> str:
        text = f"compute {self.compute}, reduce {self.reduce}, master {self.master}"
        named = [part for part in ("output", "buffers", "float8", "moments") if getattr(self, part) is not None]
        more = [f"{part} {getattr(self, part)}" for part in named] + ["stochastic rounding"] * (self.rounding == "stochastic")
        return ", ".join([text, *more])


@dataclass(frozen=True)
class Batch:
    """The shape of one rank's work in a step: `accumulate` micro-batches of `micro_batch` × `sequence` tokens.

    `dims`: of a row that is no sequence of tokens, such as `3×224×224`; `sequence` is 1 then.

    `sync`: gradients are reduced after `every` micro-batch, which needs the least memory, or only after the `last` one, which
    moves the fewest bytes; unreduced gradients then stay in memory until the end.
    """

    micro_batch: int = 1
    sequence: int = 1024
    accumulate: int = 1
    sync: Sync = "every"
    dims: str = ""

    def __post_init__(self) -> None:
        for part in ("micro_batch", "sequence", "accumulate"):
            check_positive_integer(f"batch.{part}", getattr(self, part))
        if not isinstance(self.dims, str) or not self.dims.isprintable() or len(self.dims) > 1000:
            raise PlanError(f"batch.dims must be a short text such as '3×224×224', not {self.dims!r}")
        if self.dims and self.sequence != 1:
            raise PlanError(f"batch.sequence = {self.sequence} has no effect with batch.dims; write sequence = 1")
        check_choice("batch.sync", self.sync, get_args(Sync))
        if self.sync == "last" and self.accumulate == 1:
            raise PlanError("batch.sync = 'last' has no effect with batch.accumulate = 1; write 'every', or accumulate more")

    def __str__(self) -> str:
        when = "every micro-batch" if self.sync == "every" else "the last micro-batch"
        row = "row" if self.micro_batch == 1 else "rows"
        shape = f"{self.micro_batch} {row} of {self.dims}" if self.dims else f"{self.micro_batch} × {self.sequence} tokens"
        return f"{shape}, {self.accumulate} accumulated, gradients reduced after {when}"


@dataclass(frozen=True)
class Prefetch:
    """How many units ahead parameters are gathered; 1 overlaps one gather with the compute of one unit."""

    forward: int = 1
    backward: int = 1

    def __post_init__(self) -> None:
        for part in ("forward", "backward"):
            check_positive_integer(f"prefetch.{part}", getattr(self, part))

    def __str__(self) -> str:
        return f"{self.forward} forward, {self.backward} backward"


@dataclass(frozen=True)
class Wire:
    """How a unit's parameters and gradients travel between ranks.

    `gather`, `reduce`: `plain` is the dtype of the plan's precision. `int8` and `fp8` send 8 bits for each element of a
    parameter and an fp32 scale for each `block` of them, which is approximate. `error_feedback`: what rounding took from a
    gradient is kept and added to the next one. `memory`: that collectives send from and receive in. NCCL copies nothing to
    buffers of its own where that is `nccl` or `symmetric`; gradients are then summed and divided, not averaged by NCCL.
    """

    gather: WireFormat = "plain"
    reduce: WireFormat = "plain"
    block: int = BLOCK
    error_feedback: bool = False
    memory: WireMemory = "torch"

    def __post_init__(self) -> None:
        for part in ("gather", "reduce"):
            check_choice(f"wire.{part}", getattr(self, part), get_args(WireFormat))
        check_choice("wire.memory", self.memory, get_args(WireMemory))
        check_positive_integer("wire.block", self.block)
        if self.block < MESSAGE_GRAIN:
            raise PlanError(f"wire.block = {self.block} must be at least {MESSAGE_GRAIN}, or its scales outweigh what they save")
        if not isinstance(self.error_feedback, bool):
            raise PlanError(f"wire.error_feedback must be true or false, not {self.error_feedback!r}")
        if self.error_feedback and self.reduce == "plain":
            raise PlanError(
                "wire.error_feedback has no effect with wire.reduce = 'plain'; write 'int8' or 'fp8', or leave it out"
            )
        if self.block != BLOCK and self.is_plain:
            raise PlanError(f"wire.block = {self.block} has no effect: gathers and reductions are plain; leave it out")
        if self.memory != "torch" and not self.is_plain:
            raise PlanError(
                f"wire.memory = {self.memory!r} has no effect on quantised messages; leave it out, or wire.gather and wire.reduce"
            )

    @property
    def is_plain(self) -> bool:
        """True if nothing is quantised."""
        return self.gather == self.reduce == "plain"

    def message_bytes(self, *parameters: int) -> int:
        """Bytes of a quantised message of parameters of so many elements: for each the scales, then a byte for each element."""
        return sum(-(-(SCALE_BYTES * -(-n // self.block) + n) // MESSAGE_GRAIN) * MESSAGE_GRAIN for n in parameters)

    def __str__(self) -> str:
        kept = ", with error feedback" if self.error_feedback else ""
        blocks = "" if self.is_plain else f", in blocks of {self.block}"
        memory = "" if self.memory == "torch" else f", in {self.memory} memory"
        return f"gathers {self.gather}, reductions {self.reduce}{blocks}{kept}{memory}"


@dataclass(frozen=True)
class Kernels:
    """What computes parts of a step. All choices give the same numbers, within rounding; `auto` is the fastest that works.

    `attention`: the backend of torch's `scaled_dot_product_attention` in blocks; `auto` is torch's choice for each shape.
    `loss`: of the chunked loss, softmax and gradient. `update`: clipping and Adam of resident state. Of these two, `fused` is one
    Triton kernel, which reads and writes memory once, and `torch` is torch's own.
    """

    attention: AttentionKernel = "auto"
    loss: Kernel = "auto"
    update: Kernel = "auto"

    def __post_init__(self) -> None:
        check_choice("kernels.attention", self.attention, get_args(AttentionKernel))
        for part in ("loss", "update"):
            check_choice(f"kernels.{part}", getattr(self, part), get_args(Kernel))

    @property
    def is_auto(self) -> bool:
        """True if nothing is chosen."""
        return self == Kernels()

    def __str__(self) -> str:
        return f"attention {self.attention}, loss {self.loss}, update {self.update}"


def idle_loss_kernel(name: str, kernel: Kernel, loss: str) -> str:
    """Why a choice of the loss's kernel, by this name, has no effect on this loss; empty if it has one."""
    idle = kernel != "auto" and loss != "chunked"
    return f"{name} is of the chunked loss, and has no effect on '{loss}'; leave it out" if idle else ""


@dataclass(frozen=True)
class Unit:
    """Modules that gather, compute and free together.

    `layout`: `sharded` splits parameters, gradients and optimizer state over the mesh's shard axis. `optimizer` splits the
    optimizer state, and keeps parameters and gradients whole during a step (ZeRO-1). `replicated` keeps everything whole on
    every rank. `experts` spreads a mixture's experts over the mesh's expert axis, sends tokens to them, and shards each rank's
    experts over the rest of the shard axis.
    `reshard`: when gathered parameters are freed. True: after forward, and they are gathered again for backward. False: after
    backward. A number: after forward, but each group of so many ranks keeps a copy, so backward gathers only within it.
    """

    name: str
    modules: tuple[str, ...]
    layout: Layout = "sharded"
    reshard: bool | int = True
    remat: Remat = "none"
    home: Home = field(default_factory=Home)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PlanError(f"unit.name must be a non-empty string, not {self.name!r}")
        if not isinstance(self.modules, tuple) or not self.modules or not all(isinstance(m, str) for m in self.modules):
            raise PlanError(f"unit {self.name}: modules must be a non-empty tuple of module names, not {self.modules!r}")
        check_choice(f"unit {self.name}: layout", self.layout, get_args(Layout))
        check_choice(f"unit {self.name}: remat", self.remat, get_args(Remat))
        if not isinstance(self.home, Home):
            raise PlanError(f"unit {self.name}: home must be a Home, not {self.home!r}")
        if not isinstance(self.reshard, int):  # bool is an int
            raise PlanError(f"unit {self.name}: reshard must be True, False or a number of ranks, not {self.reshard!r}")
        if not isinstance(self.reshard, bool) and self.reshard < 2:
            raise PlanError(f"unit {self.name}: reshard = {self.reshard} must be at least 2 ranks; write True or False instead")
        if self.layout not in ("sharded", "experts") and self.reshard is not False:
            raise PlanError(f"unit {self.name}: reshard = {self.reshard} has no effect with layout '{self.layout}'; write False")


# -- checks ------------------------------------------------------------------------------------------


def check_positive_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} must be a positive integer, not {value!r}")
    if value > LARGEST_INTEGER:
        raise PlanError(f"{name} must be a positive integer of at most 64 bits, not one of {value.bit_length()}")


def checked_share(name: str, value: object) -> float:
    """The value as a float; raise unless it is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise PlanError(f"{name} must be a number from 0 to 1, not {value!r}")
    return float(value)


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise PlanError(f"{name} must be one of {', '.join(known)}, not {value!r}{nearest(str(value), list(known))}")


def checked_splits(rules: object) -> SplitRules:
    """Rules for the tensor axis, from a dict or pairs. Raise for one that makes no sense."""
    pairs: list[Any] = (
        list(rules.items()) if isinstance(rules, dict) else [*rules] if isinstance(rules, list | tuple) else [rules]
    )
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            example = "{'*.fc1': 'output', '*.fc2': 'input'}"
            raise PlanError(f"split must be a dict of module patterns, such as {example}, not {rules!r}")
    for pattern, how in pairs:
        if not isinstance(pattern, str) or not pattern:
            raise PlanError(f"split: a pattern must be a module path with wildcards, not {pattern!r}")
        check_choice(f"split: {pattern}", how, get_args(Split))
    return tuple((pattern, how) for pattern, how in pairs)


def refuse_twice(what: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlanError(f"{what} {name!r} appears twice in the plan; give each {what} one place")
        seen.add(name)
