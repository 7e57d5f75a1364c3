"""What `fullshard measure` timed on a machine.

Values only: an engine does the timing (`fullshard.on_torch.measuring`). Standard library only.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from fullshard.cluster.hardware import check_one_of, check_positive

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]


@dataclass(frozen=True)
class MeasuredGemm:
    """A timed product of an m × k and a k × n matrix."""

    m: int
    n: int
    k: int
    seconds: float

    def __post_init__(self) -> None:
        check_positive(self, "measured.gemms")

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def rate(self) -> float:
        return self.flops / self.seconds

    def bytes(self, item: int) -> float:
        return float(item * (self.m * self.k + self.k * self.n + self.m * self.n))


@dataclass(frozen=True)
class MeasuredAttention:
    """Flops a second of timed causal attention at one sequence length and head width. Only the causal half counts."""

    width: int
    sequence: int
    forward: float
    backward: float

    def __post_init__(self) -> None:
        check_positive(self, "measured.attention")


@dataclass(frozen=True)
class MeasuredCollective:
    """A timed collective: seconds = `latency` + bytes on the wire / `bandwidth`, over `ranks` on `nodes`."""

    kind: CollectiveKind
    ranks: int
    nodes: int
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_one_of("measured.collectives: kind", self.kind, get_args(CollectiveKind))
        check_positive(self, "measured.collectives")


@dataclass(frozen=True)
class Measured:
    """What was timed, in the units of the nominal numbers; None for what was not.

    `dtype`: of the matrix products and attention. `notes`: sentences about what was left out or is uncertain.
    """

    machine: str
    dtype: str
    memory: int | None = None
    hbm: float | None = None
    pointwise: float | None = None
    launch: float | None = None
    issued: float | None = None
    checkpointed: float | None = None
    saved: float | None = None
    dispatched: float | None = None
    quiet: float | None = None
    host_memory: int | None = None
    pcie_up: float | None = None
    pcie_down: float | None = None
    pcie_both: float | None = None
    dram: float | None = None
    adamw: float | None = None
    pcie_beside: float | None = None
    adamw_beside: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    disk_both: float | None = None
    disk: int | None = None
    gemms: tuple[MeasuredGemm, ...] = ()
    attention: tuple[MeasuredAttention, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_positive(self, "measured")
        check_one_of("measured.dtype", self.dtype, ("bf16", "fp32"))
