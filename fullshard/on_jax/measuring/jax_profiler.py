"""A profile of a few steps on this process: XLA's trace of its devices, with the unit of each operation beside it.

A trace names operations of the compiled program; the program itself says which unit each belongs to and what it moves. So the
step is compiled once more when the trace is written.
"""

import gzip
import json
import math
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from fullshard.base.errors import FullshardError
from fullshard.engine.machine import StepProfiler
from fullshard.on_jax.communication.hlo_collectives import collectives_of, operations_of
from fullshard.on_jax.parallelize.state import JaxState, device_bytes
from fullshard.on_jax.ranks.processes import rank_and_world

ALL_UNITS = "(all units)"


class JaxProfiler(StepProfiler):
    """Records from its making to `write`."""

    def __init__(self, state: JaxState):
        super().__init__()
        self.state = state
        state.compiled = {key: _Recorded(step) if key[0] == "step" else step for key, step in state.compiled.items()}
        self.directory = Path(tempfile.mkdtemp())
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # the calls of Python functions would be most of the trace
        jax.profiler.start_trace(str(self.directory), profiler_options=options)

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        return jax.profiler.TraceAnnotation(name)

    def write(self, directory: Path) -> None:
        """Stop, and write this process's trace."""
        jax.profiler.stop_trace()
        steps = self.state.compiled
        recorded = [step for step in steps.values() if isinstance(step, _Recorded) and step.shapes]
        self.state.compiled = {key: step.inner if isinstance(step, _Recorded) else step for key, step in steps.items()}
        try:
            found = next(self.directory.rglob("*.trace.json.gz"), None)
            if not recorded:
                raise FullshardError("the profiled steps were compiled in the profile; write a later profile.at")
            if found is None:
                raise FullshardError("the profiler of JAX wrote no trace")
            document = json.loads(gzip.decompress(found.read_bytes()))
        finally:
            shutil.rmtree(self.directory)
        document["fullshard"] = self._about(recorded[0])
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank-{rank_and_world()[0]:05d}.trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps(document).encode()))

    def _about(self, step: "_Recorded") -> dict[str, Any]:
        compiled = step.inner.lower(*step.shapes).compile()
        text, mesh = compiled.as_text(), self.state.plan.mesh
        moved: dict[str, dict[str, Any]] = {}
        for c in collectives_of(text, mesh):
            ranks = math.prod(getattr(mesh, axis) for axis in c.axes)
            entry = moved.setdefault(c.operation, {"kind": c.kind, "bytes": 0, "ranks": ranks, "unit": c.unit})
            entry["bytes"] += c.nbytes
        operations = {
            name: {"unit": unit, "phase": phase} | moved.get(name, {}) for name, (unit, phase) in operations_of(text).items()
        }
        devices = [d.id for d in self.state.shardings.mesh.devices.flat if d.process_index == jax.process_index()]
        return {
            "version": 1,
            "engine": "jax",
            "rank": rank_and_world()[0],
            "world": mesh.devices,
            "devices": devices,
            "platform": self.state.shardings.mesh.devices.flat[0].platform,
            "operations": {name: about for name, about in operations.items() if any(about.values())},
            "held": self._held(compiled.memory_analysis()),
        }

    def _held(self, found: Any) -> dict[str, dict[str, int]]:
        """Bytes of a device during the step: parameters by unit, and what XLA counts besides."""
        units: dict[str, dict[str, int]] = {}
        for name, array in self.state.params.items():
            if array.sharding.memory_kind != "pinned_host":
                row = units.setdefault(self.state.shardings.parameters[name].unit.name, {"params": 0})
                row["params"] += device_bytes(array)
        params = sum(row["params"] for row in units.values())
        optimizer = self.state.held_bytes()["optimizer"]
        rest = max(0, found.argument_size_in_bytes - params - optimizer)
        return units | {ALL_UNITS: {"optimizer": optimizer, "batch": rest, "temporaries": found.temp_size_in_bytes}}


class _Recorded:
    """A compiled step that remembers the shapes of its arguments."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.shapes: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> Any:
        self.shapes = self.shapes or jax.tree.map(_shape, args)
        return self.inner(*args)

    def _cache_size(self) -> int:
        return self.inner._cache_size()


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x
