"""The choices of a plan, a row each: mesh, precision, batch, prefetch, wire and kernels, as immutable values that check
themselves. Those of single units are in `unit_choices.py`.

A new choice is a field with `choice(…)`; see `choice.py` for what follows from it. Standard library only.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fullshard.plan.choice import Part, PlanError, check_choices, choice
from fullshard.plan.engine_traits import EngineLimit

DType = Literal["fp32", "bf16", "fp16"]
Float8 = Literal["tensorwise", "rowwise"]  # how many elements share a scale
MomentKind = Literal["fp32", "bf16", "int8"]
Rounding = Literal["nearest", "stochastic"]
Sync = Literal["every", "last"]
WireFormat = Literal["plain", "int8", "fp8"]
WireMemory = Literal["torch", "nccl", "symmetric"]
AttentionKernel = Literal["auto", "cudnn", "flash"]
Kernel = Literal["auto", "fused", "torch"]


BLOCK = 256  # elements with one scale, by default
SCALE_BYTES, MESSAGE_GRAIN = 4, 16  # of an fp32 scale; messages begin at multiples of the grain, so that scales are aligned
LOW_BIT = {"jax": EngineLimit("the engine has no low-bit optimizer state")}
GATHERS_OF_XLA = {"jax": EngineLimit("XLA schedules gathers itself")}
UPDATES_OF_XLA = {"jax": EngineLimit("the device does all updates")}
AWAY = ("home.optimizer", ("host", "disk"))
ON_DEVICE = ": the optimizer state of every unit rests on the device; leave it out, or give a unit home.optimizer = 'host'"


@dataclass(frozen=True)
class Mesh(Part):
    """`replicate × shard × tensor` devices. `expert`: the experts of a mixture are spread over groups of so many neighbouring
    ranks of the shard axis."""

    PATH: ClassVar = "mesh.{}"

    replicate: int = choice(1, "Copies of the sharded model.")
    shard: int = choice(1, "Ranks over which a unit is split.")
    tensor: int = choice(1, "Devices that each layer is split over.", name="tensor", label="Mesh: tensor")
    expert: int = choice(
        1,
        "Devices that the experts of a mixture are spread over: tokens travel to their experts. Divides the shard axis.",
        name="expert",
        fixable=False,
        idle_in_plan=lambda plan: (
            ""
            if any(u.layout == "experts" for u in plan.units)
            else ": no unit has layout 'experts'; describe the model with experts=True, or write 1"
        ),
        limits={"jax": EngineLimit("the JAX engine has no expert axis", "write 1, or use the torch engine", idle=False)},
    )

    def __post_init__(self) -> None:
        check_choices(self)
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
class Precision(Part):
    """Dtypes. `moments` in `int8` have 8 bits an element and an fp32 scale for each block of 256. `bf16` and `int8` ones are
    approximate, and rounded stochastically; so is float8."""

    PATH: ClassVar = "precision.{}"
    NAME: ClassVar = "{}"

    compute: DType = choice(
        "fp32",
        "Dtype of gathered parameters and activations.",
        open=True,
        limits={"jax": EngineLimit("the JAX engine has no loss scaling", "write 'bf16'", lambda k: k == "fp16", idle=False)},
    )
    reduce: DType = choice("fp32", "Dtype of gradients on the wire.")
    master: Literal["fp32", "bf16"] = choice("fp32", "Dtype of the parameters that the optimizer updates.")
    output: DType | None = choice(
        None,
        "Dtype that every unit casts its output to. Another dtype than `compute` needs a `compute` other than `master`, and "
        "torch; step time and memory are then not predicted.",
        option="output_dtype",
        fixable=False,
        limits={"jax": EngineLimit("the JAX engine casts no outputs", idle=False)},
    )
    buffers: DType | None = choice(
        None,
        "Dtype of floating-point buffers. By default the model's own.",
        absent=True,
        limits={"jax": EngineLimit("the engine casts no buffers")},
    )
    float8: Float8 | None = choice(
        None,
        'Linear layers of blocks multiply in float8, with a scale for each tensor or each row. Needs `compute = "bf16"`.',
        absent=True,
        guide="float8",
        limits={"jax": EngineLimit("the engine has no float8 products")},
    )
    moments: MomentKind | None = choice(
        None,
        "Adam's moments: `bf16`, `int8` (8 bits), or `fp32` beside a bf16 master. By default of the master's dtype.",
        absent=True,
        guide="fit-a-bigger-model#low-bit-optimizer-state",
        limits=LOW_BIT,
        idle=lambda kinds: " with master = 'fp32'; leave it out" if kinds.moments == kinds.master == "fp32" else "",
    )
    rounding: Rounding = choice(
        "nearest",
        "How a bf16 master is updated, and moments that are bf16 because it is.",
        absent=True,
        limits=LOW_BIT,
        idle=lambda kinds: (
            f" with master = {kinds.master!r}: it is for a bf16 master, and moments of 'bf16' and 'int8' are rounded so anyway; "
            "write master = 'bf16', or leave it out"
            if kinds.master != "bf16"
            else ""
        ),
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.float8 is not None and self.compute != "bf16":
            raise PlanError(
                f"precision.float8 = {self.float8!r} needs precision.compute = 'bf16', not {self.compute!r}, for all but matrix "
                "products; write compute = 'bf16'"
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
class Batch(Part):
    """The shape of one rank's work in a step: `accumulate` micro-batches of `micro_batch` × `sequence` tokens. Reducing after
    `every` one needs the least memory; after the `last`, it moves the fewest bytes, and unreduced gradients stay in memory."""

    PATH: ClassVar = "batch.{}"

    micro_batch: int = choice(
        1,
        "Sequences that a rank computes at a time.",
        name="micro_batch",
        recipe="train.micro_batch",
        open=True,
        label="Micro-batch",
    )
    sequence: int = choice(1024, "Most tokens in a row.")
    accumulate: int = choice(1, "Micro-batches in a step.", name="accumulate", recipe="")
    sync: Sync = choice(
        "every",
        "Reduce gradients after `every` micro-batch, or only after the `last`.",
        name="sync",
        open=True,
        idle=lambda batch: " with batch.accumulate = 1; write 'every', or accumulate more" if batch.accumulate == 1 else "",
        idle_in_plan=lambda plan: (
            ": layout 'optimizer' reduces after the last anyway; write 'every'"
            if all(u.layout == "optimizer" for u in plan.units)
            else ""
        ),
        limits={"jax": EngineLimit("on JAX gradients are reduced after every micro-batch", "write 'every'", idle=False)},
    )
    dims: str = choice("", "Dims of a row that is no sequence of tokens, such as `3×224×224`; `batch.sequence` is 1 then.")

    def __post_init__(self) -> None:
        check_choices(self)
        if not isinstance(self.dims, str) or not self.dims.isprintable() or len(self.dims) > 1000:
            raise PlanError(f"batch.dims must be a short text such as '3×224×224', not {self.dims!r}")
        if self.dims and self.sequence != 1:
            raise PlanError(f"batch.sequence = {self.sequence} has no effect with batch.dims; write sequence = 1")

    def __str__(self) -> str:
        when = "every micro-batch" if self.sync == "every" else "the last micro-batch"
        row = "row" if self.micro_batch == 1 else "rows"
        shape = f"{self.micro_batch} {row} of {self.dims}" if self.dims else f"{self.micro_batch} × {self.sequence} tokens"
        return f"{shape}, {self.accumulate} accumulated, gradients reduced after {when}"


@dataclass(frozen=True)
class Prefetch(Part):
    """How many units ahead parameters are gathered; 1 overlaps one gather with the compute of one unit."""

    PATH: ClassVar = "prefetch.{}"
    NAME: ClassVar = "prefetch_{}"
    LIMITS: ClassVar = GATHERS_OF_XLA

    forward: int = choice(1, "Units gathered ahead in forward, where it is not `prefetch`.", open=True)
    backward: int = choice(
        1,
        "Units gathered ahead in backward, where it is not `prefetch`.",
        open=True,
        idle_in_plan=lambda plan: (
            ": every unit stays gathered from forward to backward; leave it out"
            if plan.prefetch.backward != plan.prefetch.forward and not any(u.reshard for u in plan.units)
            else ""  # one depth for both directions is well where only forward gathers
        ),
    )

    def __post_init__(self) -> None:
        check_choices(self)

    def idle_in(self, plan: Any) -> str:
        whole = all(u.layout == "replicated" for u in plan.units)
        return ": every unit of this plan is replicated, so nothing is gathered" if whole else ""

    def __str__(self) -> str:
        return f"{self.forward} forward, {self.backward} backward"


@dataclass(frozen=True)
class Wire(Part):
    """How a unit's parameters and gradients travel between ranks. `plain` is the dtype of the plan's precision. `int8` and `fp8`
    send 8 bits for each element of a parameter and an fp32 scale for each `block` of them, which is approximate. NCCL copies
    nothing to buffers of its own in `nccl` or `symmetric` memory; gradients are then summed and divided, not averaged by NCCL.
    """

    PATH: ClassVar = "wire.{}"
    NAME: ClassVar = "wire_{}"
    LIMITS: ClassVar = {"jax": EngineLimit("XLA's collectives are plain, in its own memory")}

    gather: WireFormat = choice("plain", "How parameters travel to other ranks.", guide="communication")
    reduce: WireFormat = choice("plain", "How gradients travel to their shards.", guide="communication")
    block: int = choice(
        BLOCK,
        "Elements that share a scale, where something is quantised.",
        least=MESSAGE_GRAIN,
        idle=lambda wire: ": gathers and reductions are plain; leave it out" if wire.is_plain else "",
    )
    error_feedback: bool = choice(
        False,
        "Add what rounding took from a gradient to the next one.",
        name="error_feedback",
        idle=lambda wire: (
            " with wire.reduce = 'plain'; write wire.reduce = 'int8', or leave it out" if wire.reduce == "plain" else ""
        ),
    )
    memory: WireMemory = choice(
        "torch",
        "Memory that collectives send from and receive in.",
        absent=True,
        guide="communication",
        idle=lambda wire: "" if wire.is_plain else " on quantised messages; leave it out, or wire.gather and wire.reduce",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.block < MESSAGE_GRAIN:
            raise PlanError(f"wire.block = {self.block} must be at least {MESSAGE_GRAIN}, or its scales outweigh what they save")

    def idle_in(self, plan: Any) -> str:
        if plan.mesh.shard > 1 and any(u.layout != "replicated" for u in plan.units):
            return ""
        why = "mesh.shard = 1" if plan.mesh.shard == 1 else "every unit of this plan is replicated"
        return f": {why}, so nothing is gathered or reduced to shards; leave it out"

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
class Kernels(Part):
    """What computes parts of a step. All choices give the same numbers, within rounding; `auto` is the fastest that works.
    `fused` is one Triton kernel, which reads and writes memory once, and `torch` is torch's own."""

    PATH: ClassVar = "kernels.{}"
    NAME: ClassVar = "{}_kernel"
    LIMITS: ClassVar = {"jax": EngineLimit("XLA chooses kernels")}

    attention: AttentionKernel = choice("auto", "Backend of torch's `scaled_dot_product_attention` in blocks.", guide="kernels")
    loss: Kernel = choice("auto", "What computes the chunked loss, softmax and gradient.", guide="kernels")
    update: Kernel = choice(
        "auto", "What clips and updates resident state.", guide="kernels", idle_in_plan=lambda plan: _no_update_kernel(plan)
    )

    def __post_init__(self) -> None:
        check_choices(self)

    @property
    def is_auto(self) -> bool:
        """True if nothing is chosen."""
        return self == Kernels()


def _no_update_kernel(plan: Any) -> str:
    """Why a choice of the update's kernel has no effect in this plan."""
    why = ""
    if all(u.home.params != "device" or u.home.optimizer != "device" for u in plan.units):
        why = "the state of every unit rests off the device"
    elif plan.precision.low_bit:
        why = f"low-bit state ({plan.precision}) has an update of its own"
    elif plan.precision.master != "fp32":
        why = f"only fp32 masters have a kernel beside torch's, and this one is {plan.precision.master}"
    return f": {why}; leave it out" if why else ""


def idle_loss_kernel(name: str, kernel: Kernel, loss: str) -> str:
    """Why a choice of the loss's kernel, by this name, has no effect on this loss; empty if it has one."""
    idle = kernel != "auto" and loss != "chunked"
    return f"{name} is of the chunked loss, and has no effect on '{loss}'; leave it out" if idle else ""
