"""What an engine finds out about the machine that it runs on: devices, rates and memory. Knows no engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from fullshard.cluster.topology import Cluster
from fullshard.engine.saver import StateT_contra


class StepProfiler(ABC):
    """Records steps on this rank, from its making on. A step begins when its data is asked for; its numbers end it."""

    def __init__(self) -> None:
        self.ranges: list[AbstractContextManager[Any]] = []  # that are open in the trace: the step, and in it the wait for data

    @abstractmethod
    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """A range of the trace, which is entered at once."""

    def begin(self, step: int) -> None:
        for name in (f"fullshard.step {step}", "fullshard.data"):
            self.ranges.append(self.annotate(name))
            self.ranges[-1].__enter__()

    def data_here(self) -> None:
        self.ranges.pop().__exit__(None, None, None)

    def end(self) -> None:
        self.ranges.pop().__exit__(None, None, None)

    @abstractmethod
    def write(self, directory: Path) -> None:
        """Stop, and write this rank's files, `rank-N.…`."""


class HostShare(Protocol[StateT_contra]):
    """How much slower than the cluster's host this one issues work now. `issued` and `quiet`: the cluster's numbers. `looks`: how
    many readings it takes."""

    def __call__(self, state: StateT_contra, issued: float, quiet: float, looks: int) -> float: ...


class LocalMachine(Protocol[StateT_contra]):
    """This machine. What not every engine offers is None where it does not."""

    @property
    def host_share(self) -> HostShare[StateT_contra] | None:
        """None where a step is one call, whatever the host's pace."""

    def local_devices(self) -> int:
        """How many devices of this machine a run takes by default. Asked before the ranks start, and takes none of them."""

    def local_cluster(self, devices: int) -> Cluster:
        """This machine's kind of device, by its published numbers."""

    def measure(self, directory: Path | None, quick: bool, progress: Callable[[str], None]) -> Cluster:
        """This machine, timed. Collective."""

    def profiler(self, state: StateT_contra) -> StepProfiler:
        """Start to record what this rank does."""

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception says that the device ran out of memory."""

    def out_of_host_memory(self, error: BaseException) -> bool:
        """Whether it says so of this machine's own memory, which others use, too."""

    def memory(self, state: StateT_contra) -> dict[str, int]:
        """Peak bytes of the device since the last call: `memory_allocated` and, on a GPU, `memory_reserved`."""

    def flops_per_token(self, model: Any, sequence: int) -> float:
        """Of a training step, without what is computed again. `model`: a state's."""

    def peak_flops(self, state: StateT_contra) -> float | None:
        """Of this rank's device in its fastest dtype of training, by its maker; None if unknown."""
