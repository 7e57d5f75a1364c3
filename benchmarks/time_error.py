"""Compare predicted with measured step times, on one GPU as rank 0 of N in a fake process group.

    python -m benchmarks.time_error --out FOLDER                     # all cases, one quarter after another, half an hour
    python -m benchmarks.time_error --out FOLDER --quarter 2 --no-predict
    python -m benchmarks.time_again FOLDER/quarter-2/time.json       # predicts what was measured, with no GPU

On a shared machine, single cores are up to half slower for seconds at a time, and the average core changes by a quarter
within minutes. So the cluster file and the steps are measured in the same minutes: before each of the ten parts of
`measure`, every case of a quarter runs a few steps, each from another core. This is a turn. Between turns a case waits in
its process. `seconds` is the mean of a case's steps without the fastest and the slowest eighth.

Collectives of the fake group take no time, except that a gather copies the shard into every place of its output, on a
stream of its own. These copies are not predicted.

Each step time is predicted three times: with the cluster file of the same minutes, with a file made before the first turn
(`before.json`), and with the former corrected by the host's speed during these steps (`felt`, a factor).
"""

import argparse
import dataclasses
import fnmatch
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.memory_error import CASES, LOSSES, Case, build, make_state, plan_of
from fullshard import on_torch
from fullshard.cluster.topology import Cluster
from fullshard.on_torch.measuring.host_time import issue_clock, share_of
from fullshard.on_torch.measuring.quiet_cores import QuietCores
from fullshard.on_torch.measuring.timings import middle
from fullshard.planner.time.timeline import timeline

QUARTERS = 4  # of the cases: the device holds the states of a quarter, and the activations of one case
AT_ONCE = 6  # models that are built at the same time
WARM = 4  # the most steps before those of a turn that are timed
STEPS, SECONDS = 4, 0.7  # the most timed steps of a turn, and the most seconds

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("time_error"))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quarter", type=int, choices=range(QUARTERS), help="of the cases; by default all, one after the other")
    which.add_argument("--only", nargs="+", help="names of cases, with wildcards; they run as one quarter")
    parser.add_argument("--no-predict", action="store_true", help="measure only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a GPU; benchmarks/time_again.py predicts what was measured on one")
    timed = [c for c in CASES if c.trained != "norms"]
    quarters = {f"quarter-{i}": timed[i::QUARTERS] for i in range(QUARTERS) if args.quarter in (i, None)}
    if args.only:
        quarters = {"some": [c for c in timed if any(fnmatch.fnmatch(c.name, o) for o in args.only)]}
        if not quarters["some"]:
            raise SystemExit(f"error: no case is called {' or '.join(args.only)}; the cases are in benchmarks/memory_error.py")
    rows = []
    for name, cases in quarters.items():
        measure_together(cases, args.out / name)
        rows += [] if args.no_predict else predicted(args.out / name)
    summarise(rows)


# -- measuring ----------------------------------------------------------------------------------------


def measure_together(cases: list[Case], out: Path) -> None:
    """Measure the machine, then again with a turn of all cases before each part. Writes both files and the rows."""
    out.mkdir(parents=True, exist_ok=True)
    before = on_torch.measure()
    before.save(out / "before.json")
    print(before, flush=True)
    about = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    turns: dict[str, list[Row]] = {}

    def keep(cluster: Cluster | None = None) -> list[Row]:
        rows = [combine(found, cluster or before) for found in turns.values()]
        files = {name: file.to_dict()["measured"] for name, file in (("cluster", cluster), ("before", before)) if file}
        (out / "time.json").write_text(json.dumps({**about, **files, "rows": rows}, indent=1))
        return rows

    with case_processes(cases) as run_turns:

        def round_of_turns(part: str) -> None:
            began = time.perf_counter()
            for row in run_turns():
                turns.setdefault(row["name"], []).append(row)
            keep()
            print(f"a turn of each in {time.perf_counter() - began:.1f} s, then {part}", flush=True)

        cluster = on_torch.measure(progress=round_of_turns)
    cluster.save(out / "cluster.json")
    print(cluster, flush=True)
    for row in keep(cluster):
        print(json.dumps({k: v for k, v in row.items() if k not in ("case", "steps", "beside")}), flush=True)


def combine(turns: list[Row], cluster: Cluster) -> Row:
    """The row of a case, from all its turns."""
    if failed := [turn for turn in turns if "failed" in turn]:
        return failed[0]
    steps, issues, clocked = ([x for turn in turns for x in turn[key]] for key in ("steps", "issues", "clocked"))
    host = cluster.of("issued"), cluster.of("quiet")
    return {key: turns[0][key] for key in ("name", "case", "tensors", "units")} | {
        "seconds": middle(steps),
        "issue": middle(issues),
        "felt": share_of(middle(clocked), *host),
        "turns": [len(turn["steps"]) for turn in turns],
        "steps": steps,
        "beside": [share_of(c, *host) for c in clocked],
    }


@contextmanager
def case_processes(cases: list[Case]) -> Iterator[Callable[[], list[Row]]]:
    """Start the processes of the cases. Gives a function that runs a turn of every case and returns their rows."""
    spawn = get_context("spawn")  # CUDA does not work after a fork
    processes: list[Any] = []
    pipes: dict[str, Connection] = {}

    def start(few: list[Case]) -> dict[str, Row]:
        here, there = spawn.Pipe()
        process = spawn.Process(target=serve, args=(few, there), daemon=True)
        process.start()
        processes.append(process)
        there.close()
        ready = here.recv()
        pipes.update({c.name: here for c in few if "failed" not in ready[c.name]})
        print(f"{', '.join(ready)}: {'; '.join(row.get('failed', 'ready') for row in ready.values())}", flush=True)
        return ready

    def run_turns() -> list[Row]:
        for name in [c.name for c in cases if c.name in pipes]:
            pipes[name].send(name)
            rows[name] = pipes[name].recv()
            if "failed" in rows[name]:
                del pipes[name]
        return list(rows.values())

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            rows = {name: row for ready in pool.map(start, process_groups(cases)) for name, row in ready.items()}
        yield run_turns
    finally:
        for process in processes:
            process.kill()
            process.join()


def process_groups(cases: list[Case]) -> list[list[Case]]:
    """The cases of each process. Two with the same world size share one, since a device may allow sixteen processes only."""
    alike: dict[Any, list[Case]] = {}
    for case in cases:
        alike.setdefault(case.name if case.compile else case.devices, []).append(case)
    return [few[i : i + 2] for few in alike.values() for i in range(0, len(few), 2)]


def serve(cases: list[Case], pipe: Connection) -> None:
    """Run a turn of the case that the pipe asks for. Cached memory is freed between turns, for other processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cases[0].devices)
    own: dict[str, Steps] = {}

    def attempt(case: Case, call: Callable[[], Row]) -> Row:
        row: Row = {"name": case.name, "case": dataclasses.asdict(case)}
        try:
            return row | call()
        except Exception:
            return row | {"failed": traceback.format_exc()[-1000:]}
        finally:
            torch.cuda.empty_cache()

    def ready(case: Case) -> Row:
        own[case.name] = Steps(case)
        return {}

    found = {case.name: attempt(case, lambda case=case: ready(case)) for case in cases}  # type: ignore[misc]
    with QuietCores(issue_clock(torch.device("cuda"))) as cores:
        pipe.send(found)
        by_name = {case.name: case for case in cases}
        while name := pipe.recv():
            pipe.send(attempt(by_name[name], lambda: own[name].turn(cores)))


class Steps:
    """The sharded model of a case, and its steps."""

    def __init__(self, case: Case):
        self.state, self.batches = make_state(case)
        self.loss = LOSSES[case.loss]
        self.size = {"tensors": len(self.state.parameters()), "units": len(self.state.plan.units)}

    def turn(self, cores: QuietCores) -> Row:
        """Time steps, each from another core, after warm-up steps until no more memory is allocated."""
        for _ in range(WARM):
            before = torch.cuda.memory_stats()["num_device_alloc"]
            self.step()
            if torch.cuda.memory_stats()["num_device_alloc"] == before:
                break
        steps, issues, clocked = [], [], []
        began = time.perf_counter()
        while not steps or (len(steps) < STEPS and time.perf_counter() - began < SECONDS):
            cores.move()
            before_step = cores.time_core()
            seconds, issued = self.step()
            steps.append(seconds)
            issues.append(issued)
            clocked.append((before_step + cores.time_core()) / 2)
        return self.size | {"steps": steps, "issues": issues, "clocked": clocked}

    def step(self) -> tuple[float, float]:
        """Run a step. Returns its seconds, and the seconds until it was issued."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        on_torch.train_step(self.state, self.batches, loss=self.loss, clip=1.0)
        returned = time.perf_counter()
        torch.cuda.synchronize()
        return time.perf_counter() - start, returned - start


# -- predicting ---------------------------------------------------------------------------------------


PREDICTIONS = {
    "error": "file of the same minutes",
    "error_before": "file made before",
    "error_told": "corrected by the host's speed",
}


def predicted(out: Path) -> list[Row]:
    """The rows of a quarter with their predictions, which are also written to its file."""
    table = json.loads((out / "time.json").read_text())
    table["rows"] = predict_all(table["rows"], Cluster.load(out / "cluster.json"), Cluster.load(out / "before.json"))
    (out / "time.json").write_text(json.dumps(table, indent=1))
    return table["rows"]


def predict_all(rows: list[Row], cluster: Cluster | None, before: Cluster | None) -> list[Row]:
    """The rows with their predictions. Prints a line for each."""
    cases, found = {c.name: c for c in CASES}, []
    rows, failed = [r for r in rows if "failed" not in r], [r for r in rows if "failed" in r]
    for row in rows:
        measured = {key: value for key, value in row.items() if key not in PREDICTIONS}
        found.append(measured | predict(cases[row["name"]], row, cluster, before))
        errors = "; ".join(f"{words} {found[-1][kind]:+.1%}" for kind, words in PREDICTIONS.items() if kind in found[-1])
        print(f"{row['name']:32s} {row['seconds']:.4f} s; {errors}", flush=True)
    return found + failed


def predict(case: Case, row: Row, cluster: Cluster | None, before: Cluster | None) -> Row:
    """The planner's predictions for a row, with links that take no time."""
    description = on_torch.describe(build(case), micro_batch=case.batch[0], sequence=case.batch[1], compute=case.compute)
    plan = plan_of(case, description)
    own = cluster or before
    assert own is not None, "a row is predicted by a cluster file"
    files = {"error": cluster, "error_before": before, "error_told": own.with_host(row["felt"])}
    steps = {
        kind: timeline(plan, description, as_one_of(file, case.devices), loss=case.loss, spread=0.0)
        for kind, file in files.items()
        if file is not None
    }
    first = next(iter(steps.values()))
    found: Row = {"compute": first.compute, "host": first.busy["host"]}
    for kind, step in steps.items():
        found |= {kind.replace("error", "predicted"): step.seconds, kind: step.seconds / row["seconds"] - 1}
    return found


def summarise(rows: list[Row]) -> None:
    for kind, words in PREDICTIONS.items():
        if errors := [abs(r[kind]) for r in rows if kind in r]:
            print(f"{words}: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}, {len(errors)} rows")


def as_one_of(cluster: Cluster, devices: int) -> Cluster:
    """The cluster with `devices` devices, and links that take no time."""
    fast = dataclasses.replace(cluster.node.link, bandwidth=1e18, latency=1e-9, start=1e-9)
    return dataclasses.replace(cluster, devices=devices, node=dataclasses.replace(cluster.node, devices=devices, link=fast))


if __name__ == "__main__":
    main()
