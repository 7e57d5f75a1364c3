"""One case, carried out in fresh ranks: `python -m fullshard.observe.bench.case_process SPEC` starts them, and each runs this
module again. A rank writes what it measured, or why it could not, to a file of its own beside SPEC.
"""

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fullshard.base.errors import FullshardError
from fullshard.base.parent_death import die_with_parent
from fullshard.data.step_batches import close
from fullshard.engine.bench_protocols import BenchEngine, Contestant, PeerRequest, load_bench_engine
from fullshard.engine.engine import Engine, load_engine
from fullshard.launch.local import become_ranks, given_arguments
from fullshard.launch.rank_end import end_rank
from fullshard.observe.bench.resident_memory import Resident
from fullshard.planner.wire_bytes import sent_bytes
from fullshard.runs.prepare.open_data import batches
from fullshard.runs.prepare.prepare import Prepared, disk_of, prepare
from fullshard.runs.prepare.recipe_plan import make_optimizer, run_loss
from fullshard.runs.recipe.recipe import make_recipe

MODULE = "fullshard.observe.bench.case_process"
OUT_OF_MEMORY = re.compile(r"want of host memory|out of memory|DefaultCPUAllocator|Cannot allocate memory", re.I)


@dataclass(frozen=True)
class Spec:
    """What the ranks of a case do. `peer`: a system other than fullshard. `limit`: bytes of a device that they may use.
    `versions`: of the libraries, so that a result of others is not taken for one of these."""

    engine: str
    ranks: int
    recipe: dict[str, Any]
    peer: str | None
    steps: int
    warmup: int
    limit: int | None
    versions: dict[str, str]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Spec":
        return cls(**json.loads(path.read_text()))


def main() -> None:
    """In the process that the benchmark started: become the ranks. In a rank: measure."""
    arguments = given_arguments()
    path = Path((arguments or sys.argv[1:])[0])
    spec = Spec.load(path)
    if arguments is None:
        die_with_parent()
        become_ranks(spec.ranks, [str(path)], engine=spec.engine, module=MODULE)
    engine = load_engine(spec.engine)
    try:
        outcome: dict[str, Any] = {"outcome": "ok", **measure(spec, engine)}
    except Exception as error:
        if spec.limit is not None:
            _limit_memory(load_bench_engine(spec.engine), None)  # what follows needs some
        memory = engine.machine.out_of_memory(error) or OUT_OF_MEMORY.search(str(error))
        _write(path, {"outcome": "out of memory" if memory else "failed", "why": _sentence(error), "time": time.time()})
        end_rank(error)
    _write(path, outcome)
    engine.ranks.finish()


def measure(spec: Spec, engine: Engine[Any, Any]) -> dict[str, Any]:
    """What this rank measures of the case. Collective."""
    engine.ranks.start()
    recipe = make_recipe(spec.recipe, "the case")
    prepared = engine.ranks.agreement().all_or_none(lambda: prepare(recipe, engine.ranks.all_devices(), engine))
    bench = load_bench_engine(spec.engine)
    resident = Resident.begin()
    if spec.limit is not None:
        _limit_memory(bench, spec.limit)
    flops, peak = bench.flops(prepared.model, recipe.sequence)
    steps = iter(batches(recipe, prepared.plan, prepared.data, engine.ranks.data_share(prepared.plan.mesh), engine))
    began = time.perf_counter()
    try:
        contestant = _contestant(spec, prepared, bench)
        ready = time.perf_counter() - began
        timed = _timed(contestant, steps, spec, resident)
    finally:
        close(steps)
    about = {"ready_seconds": ready, "hardware": bench.hardware()}
    rank, world = engine.ranks.rank_and_world()
    about |= {"rank": rank, "devices_here": max(1, engine.ranks.all_devices() // world)}
    counts = recipe.unit == "tokens"
    return about | timed | {"flops_per_token": flops if counts else None, "peak_flops": peak if counts else None}


def _limit_memory(bench: BenchEngine, nbytes: int | None) -> None:
    assert bench.limit_memory is not None  # refused before ranks start
    bench.limit_memory(nbytes)


def _contestant(spec: Spec, prepared: Prepared, bench: BenchEngine) -> Contestant:
    engine, recipe, plan = prepared.engine, prepared.recipe, prepared.plan
    optimizer, clip, seed = make_optimizer(recipe), recipe.optim.clip, recipe.train.seed
    if spec.peer is not None:
        return bench.make_peer(spec.peer, PeerRequest(prepared.model, plan, optimizer, clip, seed))
    disk = disk_of(recipe, plan)
    state = engine.trainer.shard(prepared.model, plan, optimizer, seed=seed, weights=prepared.weights, disk=disk)
    return bench.make_contestant(state, engine.trainer.named_loss(run_loss(recipe)), clip)


def _timed(contestant: Contestant, data: Iterator[Any], spec: Spec, resident: Resident) -> dict[str, Any]:
    """Warm up, time steps, then count the collectives of one more. The first step compiles, checks and allocates: memory is
    counted from the end of it on."""
    first = time.perf_counter()
    losses = [contestant.step(next(data))]
    first = time.perf_counter() - first
    contestant.reset_peak()
    resident.reset()
    for _ in range(spec.warmup - 1):
        losses.append(contestant.step(next(data)))
    seconds, waited = [], []
    for _ in range(spec.steps):
        asked = time.perf_counter()
        micro_batches = next(data)
        start = time.perf_counter()
        losses.append(contestant.step(micro_batches))
        seconds.append(time.perf_counter() - start)
        waited.append(start - asked)
    memory = contestant.memory() | {"resident": resident.peak()}
    collectives = contestant.collectives(next(data))
    sent: dict[str, float] = {}
    for c in collectives:
        sent[c.kind] = sent.get(c.kind, 0.0) + c.times * sent_bytes(c.kind, c.nbytes, c.ranks)
    numbers = {"seconds": seconds, "first_step_seconds": first, "data_wait_seconds": statistics.median(waited), "losses": losses}
    return numbers | {"memory": memory, "sent": sent, "collectives": sum(c.times for c in collectives)}


def _write(path: Path, outcome: dict[str, Any]) -> None:
    file = path.with_name(f"rank-{os.environ.get('RANK', 0)}.json")
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(outcome))
    partial.replace(file)


def _sentence(error: Exception) -> str:
    text = re.sub(r"^\[enforce fail at \S+\] \w+\. ", "", " ".join(str(error).split()))[:500]  # where in torch's C++
    return text if isinstance(error, FullshardError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
