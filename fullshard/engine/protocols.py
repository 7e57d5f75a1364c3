"""The seam between a run and the engine that carries its plan out, as Protocols. Knows no engine.

An engine is a module, `fullshard.on_NAME.engine`, whose functions are those of `Engine`. Everything above the engines
(`runs`, `commands`) reaches them through `load_engine` or `engine_of` alone, so that the same run works on each.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from fullshard.base.errors import FullshardError, nearest
from fullshard.checkpoint.engine_state import EngineState
from fullshard.cluster.topology import Cluster
from fullshard.model.description import Description
from fullshard.plan.optimizer import Optimizer
from fullshard.plan.plan import DType, Mesh, Plan
from fullshard.ranks.rank_protocols import Messages, WatchedRanks

ENGINES = ("torch", "jax")
T = TypeVar("T")
ModelT = TypeVar("ModelT")  # a model as the engine has it: torch's nn.Module, a function that makes an NNX module
StateT = TypeVar("StateT")  # what the engine's `shard` returns


class RunState(EngineState, Protocol):
    """What a run reads of a state. A step changes it in place."""

    step: int  # steps done
    plan: Plan
    model: Any
    notes: tuple[str, ...]  # what a user should know of how it was made

    @property
    def compiles(self) -> bool:
        """True if the first step takes the time that compiling does."""

    @property
    def kernels(self) -> Mapping[str, str]:
        """Which kernels update offloaded units, by lane. Empty where none is offloaded."""

    @property
    def wire_errors(self) -> Mapping[str, float]:
        """Relative errors of quantised gathers and reductions in the first step. Empty where they are plain."""

    @property
    def updates_overlap(self) -> bool:
        """True if updates of one step may still run during the next."""


class Step(Protocol):
    """The result of one training step. Its numbers may still be on the device."""

    @property
    def index(self) -> int:
        """Of the step, counted from 1."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Means that the loss function named. The values may still be on the device."""

    @property
    def unit_norms(self) -> Mapping[str, Any]:
        """Gradient norms by unit, if they were asked for. The values may still be on the device."""

    def numbers(self) -> list[float]:
        """loss, gradient norm, count, skipped, then one number per flag, metric and unit norm. Waits for the device once."""

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase on this rank's device."""


class PendingSave(Protocol):
    """A save that may still run in the background."""

    step: int
    note: str  # a warning for the user, or nothing
    not_finite: bool  # failed because a weight was not finite
    lease_lost: bool  # failed because another process holds the directory
    messages: list[str]  # warnings about other checkpoints
    seconds: float  # that it took until it was durable
    nbytes: int  # of its files

    def done(self) -> bool: ...

    def result(self) -> str:
        """Wait for it; where the checkpoint lies. Raises on every rank if it failed on one."""


class CheckpointWriter(Protocol):
    """Saves one state into one directory of checkpoints, and holds the lease of that directory. Methods are collective."""

    @property
    def checkpoint_dir(self) -> Any:
        """The directory, a `fullshard.checkpoint.directories.Place`."""

    def save(
        self,
        *,
        cursor: int | None = None,
        recipe: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        prune: bool = True,
    ) -> PendingSave: ...

    verified: set[str]  # names of checkpoints whose checksums were compared

    def newest(self, below: float = ..., *, contents: bool = ...) -> tuple[Any, list[str]]:
        """The newest whole checkpoint of a step below `below`, or None; and why newer ones were passed over. Without `contents`,
        the checksums of its files are left to the caller."""

    def names(self) -> list[str]: ...

    def sweep(self) -> None:
        """Remove what killed saves left behind."""

    def refuse_no_space(self, count: int) -> None:
        """Raise where the disk has no room for `count` checkpoints."""

    def discard(self, step: int) -> None: ...

    def agree(self, flag: bool) -> bool:
        """Whether any rank raised the flag."""

    def wait(self) -> None: ...

    def close(self) -> None: ...

    def release(self) -> None:
        """Give the lease back without waiting for other ranks."""


class StepProfiler(Protocol):
    """Records steps on this rank, from its making on. A step begins when its data is asked for; its numbers end it."""

    def begin(self, step: int) -> None: ...

    def data_here(self) -> None: ...

    def end(self) -> None: ...

    def write(self, directory: Path) -> None:
        """Stop, and write this rank's files, `rank-N.…`."""


class Engine(Protocol[ModelT, StateT]):
    """What a run asks of an engine. Collective functions are called by every rank."""

    name: str  # one of ENGINES
    forks: bool  # whether a rank may fork, as worker processes that load data do
    # -- ranks ---------------------------------------------------------------------------------------------

    def start(self) -> Any:
        """Join the ranks that a launcher started, or be the only one. Idempotent."""

    def finish(self) -> None: ...

    def local_devices(self) -> int:
        """How many devices of this machine a run takes by default. Asked before the ranks start, and takes none of them."""

    def all_devices(self) -> int:
        """How many devices the ranks have together: what a plan is for. One each on torch; a JAX process has several."""

    def ranks_here(self) -> int:
        """How many ranks run on this machine."""

    def rank_and_world(self) -> tuple[int, int]: ...

    def is_first(self) -> bool:
        """Whether this rank writes files and prints."""

    def data_share(self, mesh: Mesh) -> tuple[int, int]:
        """Which share of a step's rows this rank computes, and of how many equal ones."""

    def first_decides(self, make: Callable[[], Any]) -> None:
        """Call `make` on the first rank; if it raises, all ranks raise its sentence. Collective."""

    def all_or_none(self, make: Callable[[], T]) -> T:
        """Call `make` on all ranks; if one raises, all raise its sentence. Collective."""

    def messages(self) -> Messages: ...

    def lost_a_peer(self, error: BaseException) -> bool:
        """True if an error only says that the connection to another rank is lost."""

    def watched_ranks(self) -> WatchedRanks: ...

    def versions(self) -> dict[str, str]:
        """The libraries whose versions must agree between ranks."""

    # -- the model -----------------------------------------------------------------------------------------

    def load_model(self, name: str, *, init: str = "factory", call: str | None = None, scan: bool = False) -> ModelT:
        """A preset, a Hugging Face directory or `file.py:callable`, without memory for its weights. `init`: whose initial
        values a file's model gets. `call`: a function (model, batch) -> logits. `scan`: equal blocks are one compiled loop."""

    def add_adapters(self, model: ModelT, *, rank: int, alpha: int, dropout: float, targets: Sequence[str]) -> ModelT: ...

    def check_weights(self, model: ModelT, directory: str | Path) -> None:
        """Raise where a directory of safetensors files lacks a tensor of the model, or has it in another shape."""

    def describe(
        self,
        model: ModelT,
        *,
        classes: Sequence[str] = (),
        names: Sequence[str] = (),
        min_params: int = 0,
        experts: bool = False,
        small: int = 0,
        title: str = "",
        micro_batch: int = 0,
        sequence: int = 0,
        example: Any = None,
        loss: Any = None,
        compute: DType = "bf16",
        tensor: Sequence[int] = (),
        expert: Sequence[int] = (),
    ) -> Description:
        """The model's units and, with a batch shape, what computing them costs. `example`: a batch in place of that shape, of a
        model that does not take rows of tokens, with its `loss`."""

    def limits(self, model: ModelT) -> tuple[int | None, int | None]:
        """(vocabulary, longest sequence), as far as the model says."""

    def classes_and_image_size(self, model: ModelT) -> tuple[int | None, int | None]:
        """(number of classes, pixels of an image's side), as far as the model says."""

    def takes_positions(self, model: ModelT) -> bool:
        """Whether the model takes `position_ids`, which keep attention inside documents."""

    def parameter_shapes(self, model: ModelT) -> list[tuple[str, tuple[int, ...], str, bool]]:
        """Name, shape, dtype and whether it is trained, of every parameter."""

    def weights_of(self, model: ModelT, plan: Plan) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the weights that a checkpoint of this model holds, by name."""

    def refuse(self, model: ModelT, plan: Plan, optimizer: Optimizer | None = None, disk: str | Path | None = None) -> None:
        """Raise where the engine cannot carry the plan out. Allocates nothing."""

    def refuse_batch(self, model: ModelT, loss: Any, batch: Any) -> None:
        """Raise where the model cannot be called with such a batch, as far as that is known before ranks start."""

    # -- the machine ---------------------------------------------------------------------------------------

    def local_cluster(self, devices: int) -> Cluster:
        """This machine's kind of device, by its published numbers."""

    def measure(self, directory: Path | None, quick: bool, progress: Callable[[str], None]) -> Cluster:
        """This machine, timed. Collective."""

    def disk_rates(self, directory: str | Path, nbytes: int, seconds: float) -> Any:
        """What the slowest rank reaches while all read and write: a `fullshard.storage.disk_speed.Rates`. Collective."""

    def host_share(self, state: StateT, issued: float, quiet: float, looks: int) -> float:
        """How much slower than the cluster's host this one issues work now."""

    # -- training ------------------------------------------------------------------------------------------

    def shard(
        self,
        model: ModelT,
        plan: Plan,
        optimizer: Optimizer | None = None,
        *,
        seed: int = 0,
        weights: str | Path | None = None,
        disk: str | Path | None = None,
    ) -> StateT:
        """Carry the plan out on the model. Collective."""

    def seed_dropout(self, state: StateT, seed: int) -> None:
        """Seed the random numbers of training: for each data rank a stream of its own. A checkpoint restores them."""

    def loader(self, workers: int, prefetch: int, *, seed: int = 0, threads: bool = True) -> Any:
        """Loads batches ahead: a `fullshard.data.step_batches.BatchLoader`. `threads`: whether a thread may read the data."""

    def collate(self, samples: Sequence[Any]) -> Any:
        """Samples of equal shapes as one batch: a tree of stacked tensors."""

    def seeded(self, seed: int, i: int) -> AbstractContextManager[None]:
        """A context in which random numbers depend on `seed` and `i` alone."""

    def named_loss(self, name: str) -> Any:
        """The loss called `plain` or `chunked`, an objective's, `file.py:callable`, or `call`: that of the model's own call."""

    def refuse_loss(self, model: ModelT, name: str) -> None:
        """Raise if the model is not trained with the loss of this name."""

    def train_step(
        self,
        state: StateT,
        micro_batches: Sequence[Any],
        *,
        loss: Any = ...,
        clip: float | None = None,
        lr: float | None = None,
        flags: Sequence[bool] = (),
        unit_norms: bool = False,
    ) -> Step:
        """Forward, backward and update. `flags` are combined over ranks with the step's own sums. `unit_norms`: the result has
        the gradient norm of each unit. Collective."""

    def evaluate(self, state: StateT, batches: Iterable[Any], *, loss: Any = ...) -> dict[str, float]:
        """The mean `loss` over all that counts in all ranks' batches, and the means of its metrics. Collective."""

    def generate(
        self,
        model: Any,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        stop: int | None = None,
        seed: int = 0,
        window: int | None = None,
    ) -> list[int]:
        """Continue a prompt with a state's `model`. Collective."""

    def profiler(self, state: StateT) -> StepProfiler:
        """Start to record what this rank does."""

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception says that the device ran out of memory."""

    def memory(self, state: StateT) -> dict[str, int]:
        """Peak bytes of the device since the last call: `memory_allocated` and, on a GPU, `memory_reserved`."""

    def flops_per_token(self, model: Any, sequence: int) -> float:
        """Of a training step, without what is computed again. `model`: a state's."""

    def peak_flops(self, state: StateT) -> float | None:
        """Of this rank's device in its fastest dtype of training, by its maker; None if unknown."""

    # -- checkpoints ---------------------------------------------------------------------------------------

    def checkpointer(self, checkpoint_dir: str | Path, state: StateT, *, keep: Any, overlap: bool, run: str) -> CheckpointWriter:
        """`keep`: a `fullshard.checkpoint.retention.Retention`. Collective."""


def load_engine(name: str, user: str = "") -> Engine[Any, Any]:
    """The engine of this name. Raises a sentence, which names `user`, where there is none or what it needs is not installed."""
    refuse_engine(name)
    try:
        return cast(Engine[Any, Any], importlib.import_module(f"fullshard.on_{name}.engine"))
    except ImportError as error:
        raise FullshardError(f"{user or f'engine {name!r}'} needs {name} ({error}); pip install 'fullshard[{name}]'") from None


def refuse_engine(name: str) -> None:
    """Raise where there is no engine of this name."""
    if name not in ENGINES:
        raise FullshardError(f"there is no engine {name!r}; write {' or '.join(ENGINES)}{nearest(name, list(ENGINES))}")


def engine_of(state: EngineState) -> Engine[Any, Any]:
    """The engine that made a state."""
    return load_engine(state.engine)
