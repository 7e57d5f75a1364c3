"""What an operation does to a rank: what it allocates and frees on the device, and which work it gives to which lane.

Made by `lowering`, one for each operation. Memory and time are folds over them: `memory.memory_fold` plays the events onto a
tape, `time.step_lanes` lays the work onto lanes. Neither asks what a plan's choices mean.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fullshard.cluster.measured import CollectiveKind
from fullshard.plan.plan import HomeName
from fullshard.planner.step.quantized_wire import Quantization
from fullshard.planner.step.saved_activations import Saved
from fullshard.planner.step.schedule import Operation

Term = Literal[
    "params",
    "optimizer",
    "buffers",
    "gradients",
    "activations",
    "loss",
    "gathered",
    "whole gradients",
    "reduce",
    "residuals",
    "workspace",
    "batch",
    "staging",
    "fetched",
]
COMPUTE, GATHER, REDUCE, ALL_REDUCE, TRANSFER = 0, 1, 2, 3, 4  # streams of FSDP2 and of offload; each has its own memory pool
Row = tuple[int, ...]  # bytes of tensors that come and go together; their names are one name and their numbers

# -- on the device. An event's fields are the arguments of what plays it (`MemoryFold.verbs`).


class Allocate(NamedTuple):
    """Allocate a tensor; of no bytes, nothing."""

    owner: str
    tensor: str
    nbytes: int
    term: Term
    stream: int = COMPUTE


class AllocateBeside(NamedTuple):
    """Allocate where another tensor of the owner is alive."""

    owner: str
    beside: str
    tensor: str
    nbytes: int
    term: Term


class Free(NamedTuple):
    """Free what is alive; nothing else happens, as with the events below that end or rename."""

    owner: str
    tensor: str


class AllocateRow(NamedTuple):
    """Allocate a row."""

    owner: str
    tensor: str
    row: Row
    term: Term
    stream: int = COMPUTE


class AllocateOnce(NamedTuple):
    """A row that the first step allocates and no later one."""

    owner: str
    tensor: str
    row: Row
    term: Term


class FreeAll(NamedTuple):
    """Free what is alive of several tensors, in this order."""

    owner: str
    tensors: tuple[str, ...]


class FreeRow(NamedTuple):
    """Free what is alive of a row."""

    owner: str
    tensor: str
    row: Row


class ReplaceRow(NamedTuple):
    """Allocate a row, each tensor before the one of the `old` row is freed that it replaces."""

    owner: str
    old: str
    before: Row
    tensor: str
    row: Row
    term: Term


class Rename(NamedTuple):
    """Give what is alive another name and term."""

    owner: str
    tensor: str
    name: str
    term: Term


class RunSection(NamedTuple):
    """Allocate and free what the section of a compute does."""

    op: Operation


class Leave(NamedTuple):
    """Free a unit's saved activations that are alive, which are off the device from now on."""

    unit: str
    place: HomeName
    saved: tuple[Saved, ...]


class Return(NamedTuple):
    """Allocate those of them that are off the device."""

    saved: tuple[Saved, ...]


Allocation = Allocate | AllocateBeside | AllocateOnce | AllocateRow | ReplaceRow | Return
Event = Allocation | Free | FreeAll | FreeRow | Leave | Rename | RunSection

# -- on lanes

Rate = Literal["copy", "add", "join", "widen", "foreach", "update"]  # of the device's memory, in kernels of a kind
Hooks = Literal["", "single_rank_hooks", "unit_hooks", "accumulate_hooks", "step_ops"]  # of the calibration
WorkKind = Literal["copies", "norm", "update"]


class KernelWork(NamedTuple):
    """Kernels that no trace has. `moved`: bytes read and written, by rate. `issued`: the host's work for them, as hooks and
    the number of their parameters; None for one kernel."""

    kind: WorkKind
    moved: tuple[tuple[Rate, float], ...]
    issued: tuple[Hooks, float] | None = None


class MessagePasses(NamedTuple):
    """The passes around a quantised collective: elements packed, unpacked, and written as results, of so many parameters."""

    passes: Quantization
    packed: float
    unpacked: float
    results: float
    parameters: int


class Collective(NamedTuple):
    """A collective over `ranks` ranks along an axis of the mesh, `stride` ranks of that axis apart; along none, of all ranks."""

    lane: Literal["gather", "reduce", "copies", "compute"]
    kind: CollectiveKind
    nbytes: int
    ranks: int
    along: Literal["", "shard", "replicate", "data"] = ""
    stride: int = 1
    packing: MessagePasses | None = None


@dataclass(frozen=True, slots=True)
class Effects:
    """What one operation does. `waited`: offloaded units whose updates must be done before anything else."""

    events: tuple[Event, ...] = ()
    kernels: KernelWork | None = None
    collective: Collective | None = None
    waited: tuple[str, ...] = ()
