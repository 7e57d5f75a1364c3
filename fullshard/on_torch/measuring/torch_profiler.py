"""A profile of a few steps on this rank: a Chrome trace with the ranges of steps, data, phases and FSDP's units.

FSDP names its gathers, forwards, backwards and reductions in every trace, so that units need no hooks of their own.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fullshard.engine.machine import StepProfiler
from fullshard.on_torch.parallelize.state import State, stored_bytes, there
from fullshard.on_torch.private.fsdp_groups import group_label
from fullshard.on_torch.private.torch_internals import MemoryHistory
from fullshard.on_torch.ranks.device_meshes import rank_and_world
from fullshard.on_torch.step import phase_clock

QUIET = "6"  # above all levels of the profiler's library, which else prints two lines on every rank


class TorchProfiler(StepProfiler):
    """Records from its making to `write`."""

    def __init__(self, state: State):
        super().__init__()
        self.state, self.peak = state, 0
        on_gpu = state.device.type == "cuda"
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        self.held = held_by_unit(state)
        self.memory = MemoryHistory() if on_gpu else None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.profile = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
        with _one_warning_less(state.device):
            self.profile.start()
        phase_clock.listeners.append(_mark)

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name)

    def end(self) -> None:
        super().end()
        if self.state.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())

    def write(self, directory: Path) -> None:
        """Stop, and write this rank's files."""
        phase_clock.listeners.remove(_mark)
        self.profile.add_metadata_json("fullshard", json.dumps(self._about()))
        self.profile.stop()
        directory.mkdir(parents=True, exist_ok=True)
        rank = rank_and_world()[0]
        self.profile.export_chrome_trace(str(directory / f"rank-{rank:05d}.trace.json.gz"))
        if self.memory:
            self.memory.write(directory / f"rank-{rank:05d}.memory.pickle")

    def _about(self) -> dict[str, Any]:
        rank, world = rank_and_world()
        labels = {group_label(modules[0]): unit for unit, modules in self.state.unit_modules.items() if modules}
        return {
            "version": 1,
            "engine": "torch",
            "rank": rank,
            "world": world,
            "units": {label: unit for label, unit in labels.items() if label is not None},
            "held": self.held,
            "peak_bytes": self.peak or None,
        }


@contextmanager
def _one_warning_less(device: torch.device) -> Iterator[None]:
    """Start to profile memory inside. On a CPU torch then warns, at the first of every thousand blocks that are freed, that it
    did not see the block's allocation. That first one is freed here, where nobody reads it."""
    block = torch.empty(64) if device.type == "cpu" else None
    yield
    if block is None:
        return
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        del block
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _mark(phase: str) -> None:
    with record_function(f"fullshard.end {phase}"):
        pass


def held_by_unit(state: State) -> dict[str, dict[str, int]]:
    """Bytes on this rank's device between steps, by unit and kind. What no unit has stands under `(outside units)`."""
    found: dict[str, dict[str, int]] = {unit.name: {} for unit in state.plan.units}
    found["(outside units)"] = {}
    owners = sorted(((path, u.name) for u in state.plan.units for path in u.modules), key=lambda o: -len(o[0]))

    def add(name: str, kind: str, nbytes: int) -> None:
        owner = next((unit for path, unit in owners if not path or name.startswith(f"{path}.")), "(outside units)")
        found[owner][kind] = found[owner].get(kind, 0) + nbytes

    slots = state.optimizer.state if state.optimizer else {}
    for name, p in state.model.named_parameters():
        if there(p):
            add(name, "params", stored_bytes(p))
        own = slots.get(p, {}) if not (state.offload and state.offload.holds(p)) else {}
        add(name, "optimizer", sum(stored_bytes(t) for t in own.values() if isinstance(t, torch.Tensor) and t.ndim > 0))
    for name, buffer in state.model.named_buffers():
        add(name, "buffers", stored_bytes(buffer))
    if state.device.type == "cuda":
        known = sum(n for kinds in found.values() for n in kinds.values())
        found["(outside units)"]["other"] = max(0, torch.cuda.memory_allocated() - known)
    return {unit: {kind: n for kind, n in kinds.items() if n} for unit, kinds in found.items()}
