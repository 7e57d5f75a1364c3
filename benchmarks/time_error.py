"""Predicted against measured seconds of a step, on one GPU that plays rank 0 of N (collectives take no time there).

    python -m benchmarks.time_error --out FOLDER
    python -m benchmarks.time_error --out FOLDER --only 'hf-*' 'gpt2-*' --visits 12 --seconds 0.3

First times the machine (`measure`), then steps of each case: the median of at least twelve, and of as many as take three
seconds, after three to warm up. `issue` is how long the host took to issue a step.

On a shared machine the host's pace changes within seconds, and drifts from minute to minute. With several `visits` the cases
take turns, each in a process of its own that waits while the others run, and before every turn the host's paces are timed as
`measure` times them: the file's are the middle of them all, so that the file and the steps are of the same minutes. The cases
must fit into the device's memory together, at rest, and a driver may allow no more than fifteen processes beside this one.

Three predictions: `predicted_by_file` is what the cluster file says; `predicted`, of a host that is slower or faster by what
was felt before and after every step (`felt`: a row of tiny blocks, which is what `issued` of the file is by), step by step;
`predicted_by_middle`, of a host of the middle of what was felt. Rows of earlier tables have `paces` instead of `felt`.
"""

import argparse
import dataclasses
import fnmatch
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard as fs
from benchmarks.memory_error import CASES, Case, build, initial, plan_of
from benchmarks.memory_probe import clean
from fullshard import on_torch
from fullshard.cluster import Cluster
from fullshard.on_torch.measuring.paces import ROW, glance, issue_clock, middle, paces
from fullshard.planner.timeline import timeline

WARM, STEPS = 3, 12  # steps before those that are timed, and the least of these
AT_ONCE = 4  # models that are made at a time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("time_error"))
    parser.add_argument("--only", nargs="+", default=["*"], help="names of cases, with wildcards")
    parser.add_argument("--visits", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps that a visit times, at least")
    parser.add_argument("--no-predict", action="store_true", help="measure only")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cluster = on_torch.measure()
    cluster.save(args.out / "cluster.json")
    print(cluster, flush=True)
    about = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    chosen = [c for c in CASES if any(fnmatch.fnmatch(c.name, only) for only in args.only) and c.trained != "norms"]
    found: dict[str, dict[str, Any]] = {}

    def keep(row: dict[str, Any]) -> None:
        row = found[row["name"]] = together(found.get(row["name"]), row)
        print(json.dumps({k: v for k, v in row.items() if k not in ("case", "visits", "steps", "issues", "felt")}), flush=True)
        (args.out / "time.json").write_text(json.dumps({**about, "rows": list(found.values())}, indent=1))

    if args.visits > 1:
        beside: list[dict[str, float]] = []
        cluster.save(args.out / "cluster-before.json")

        def feel() -> None:
            look = glance if len(beside) % len(chosen) else paces  # all of them before every round
            beside.append(look(torch.device("cuda")))

        for row in in_turns(chosen, args.visits, args.seconds, feel):
            keep(row)
            paced(cluster, middle(beside)).save(args.out / "cluster.json")
            (args.out / "paces.json").write_text(json.dumps(beside, indent=1))
    else:
        for case in chosen:
            keep(measure(case, args.seconds))
    if not args.no_predict:
        rows = predict_all(list(found.values()), Cluster.load(args.out / "cluster.json"))
        (args.out / "time.json").write_text(json.dumps({**about, "rows": rows}, indent=1))


def together(before: dict[str, Any] | None, row: dict[str, Any]) -> dict[str, Any]:
    """A row with the steps of an earlier visit as well."""
    if before is None or "failed" in before or "failed" in row:
        return row
    all_of = {key: before[key] + row[key] for key in ("visits", "steps", "issues", "felt")}
    return row | all_of | {"seconds": statistics.median(all_of["steps"]), "issue": statistics.median(all_of["issues"])}


# -- measuring ----------------------------------------------------------------------------------------


def measure(case: Case, seconds: float) -> dict[str, Any]:
    clean()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.devices)
    row: dict[str, Any] = {"name": case.name, "case": dataclasses.asdict(case)}
    try:
        row |= Steps(case).timed(seconds, STEPS)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:500]
    dist.destroy_process_group()
    return row


def in_turns(cases: list[Case], visits: int, seconds: float, before: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """Rows of each visit, case by case, each in a process of its own; `before` is called before every turn."""
    spawn = get_context("spawn")

    def start(case: Case) -> Connection:
        here, there = spawn.Pipe()
        spawn.Process(target=take_turns, args=(case, there, seconds, -(-STEPS // visits)), daemon=True).start()
        there.close()
        here.recv()
        return here

    with ThreadPoolExecutor(AT_ONCE) as pool:
        pipes = list(pool.map(start, cases))
    for _ in range(visits):
        for pipe in pipes:
            before()
            pipe.send(True)
            yield pipe.recv()
    for pipe in pipes:
        pipe.send(False)


def take_turns(case: Case, pipe: Connection, seconds: float, steps: int) -> None:
    """A row whenever the pipe asks for one; between them the device's memory is the others'."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.devices)
    row: dict[str, Any] = {"name": case.name, "case": dataclasses.asdict(case)}
    own: Steps | None = None

    def turn(seconds: float, steps: int) -> None:
        nonlocal own
        try:
            own = own or Steps(case)
            pipe.send(row | own.timed(seconds, steps))
        except Exception as error:
            pipe.send(row | {"failed": f"{type(error).__name__}: {error}"[:500]})
        torch.cuda.empty_cache()

    turn(0.0, 1)
    while pipe.recv():
        turn(seconds, steps)


class Steps:
    """A model in its plan, and a clock beside its steps."""

    def __init__(self, case: Case):
        model = build(case)
        plan = plan_of(case, on_torch.describe(model))
        self.state = on_torch.shard(model, plan, fs.AdamW(lr=1e-5), init=initial, device="cuda", first_step_checks=False)
        vocab = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding)).num_embeddings
        ids = torch.randint(0, vocab, (case.accumulate, case.batch[0], case.batch[1] + 1))
        self.batches = [{"input_ids": i[:, :-1].contiguous(), "labels": i[:, 1:].contiguous()} for i in ids]
        self.loss = {"plain": on_torch.summed_loss, "chunked": on_torch.chunked_loss}[case.loss]
        self.size = {"tensors": len(list(model.parameters())), "units": len(plan.units)}
        self.clock = issue_clock(torch.device("cuda"))

    def timed(self, seconds: float, least: int) -> dict[str, Any]:
        """Steps of so many seconds, and at least so many, after some to warm up."""
        found: list[tuple[float, float]] = []
        felt = [self.clock()]
        for i in itertools.count():
            if len(found) >= least and sum(taken for taken, _ in found) > seconds:
                break
            torch.cuda.synchronize()
            start = time.perf_counter()
            on_torch.train_step(self.state, self.batches, loss=self.loss, clip=1.0)
            issued = time.perf_counter()
            torch.cuda.synchronize()
            if i >= WARM:
                found.append((time.perf_counter() - start, issued - start))
            felt = [*felt, self.clock()][-len(found) - 1 :]
        return self.size | {
            "seconds": statistics.median(s for s, _ in found),
            "issue": statistics.median(i for _, i in found),
            "visits": [len(found)],
            "steps": [seconds for seconds, _ in found],
            "issues": [issued for _, issued in found],
            "felt": [(before + after) / 2 for before, after in itertools.pairwise(felt)],
        }


# -- predicting ---------------------------------------------------------------------------------------


def predict_all(rows: list[dict[str, Any]], cluster: Cluster) -> list[dict[str, Any]]:
    """The rows with what is predicted of them, and a line each."""
    cases, found = {c.name: c for c in CASES}, []
    rows, failed = [r for r in rows if "failed" not in r], [r for r in rows if "failed" in r]
    by_middle = middle_host(rows, cluster)
    for row in rows:
        felt = [seconds / ROW / cluster.of("issued") for seconds in row.get("felt", [])]
        found.append(row | predict(cases[row["name"]], cluster, row, felt, by_middle))
        told = f"{row['seconds']:.4f} s, predicted {found[-1]['predicted']:.4f}  {found[-1]['error']:+.1%}"
        others = f"by the middle pace {found[-1]['error_by_middle']:+.1%}, by the file alone {found[-1]['error_by_file']:+.1%}"
        print(f"{row['name']:32s} {told}, {others}", flush=True)
    for kind in ("error", "error_by_middle", "error_by_file"):
        errors = [abs(r[kind]) for r in found]
        print(f"{kind}: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}, {len(errors)} rows")
    return found + failed


def middle_host(rows: list[dict[str, Any]], cluster: Cluster) -> Cluster:
    """With a host of the middle pace over all rows; the cluster itself if they have none."""
    if timed := [r["paces"] for r in rows if "paces" in r]:
        return paced(cluster, middle(timed))
    felt = [statistics.median(r["felt"]) / ROW for r in rows if "felt" in r]
    return cluster.with_host(statistics.median(felt) / cluster.of("issued")) if felt else cluster


def predict(case: Case, cluster: Cluster, row: dict[str, Any], felt: list[float], by_middle: Cluster) -> dict[str, Any]:
    """What the planner says of this machine, with links that take no time; of each step with a host that takes so many times
    as long as the file's, `felt`."""
    description = on_torch.describe(build(case), micro_batch=case.batch[0], sequence=case.batch[1], compute=case.compute)
    plan = plan_of(case, description)
    told = lambda at: timeline(plan, description, playing(at, case.devices), loss=case.loss, spread=0.0)
    by_file, then = told(cluster), told(by_middle)
    if not felt:
        guesses, steps = [then.seconds], [row["seconds"]]
    else:
        ends, steps = sorted({min(felt), max(felt)}), row["steps"]
        at_ends = [told(cluster.with_host(share)).seconds for share in ends]
        guesses = [at_ends[0] + (at_ends[-1] - at_ends[0]) * (s - ends[0]) / (ends[-1] - ends[0] or 1) for s in felt]
    return {
        "predicted": statistics.median(guesses),
        "predicted_by_middle": then.seconds,
        "predicted_by_file": by_file.seconds,
        "error": statistics.median(guess / seconds - 1 for guess, seconds in zip(guesses, steps, strict=True)),
        "error_by_middle": then.seconds / row["seconds"] - 1,
        "error_by_file": by_file.seconds / row["seconds"] - 1,
        "compute": then.compute,
        "host": then.busy["host"],
    }


def playing(cluster: Cluster, devices: int) -> Cluster:
    """One device of the cluster, as if it were one of many."""
    fast = dataclasses.replace(cluster.node.link, bandwidth=1e18, latency=1e-9, start=1e-9)
    return dataclasses.replace(cluster, devices=devices, node=dataclasses.replace(cluster.node, devices=devices, link=fast))


def paced(cluster: Cluster, host: dict[str, float]) -> Cluster:
    assert cluster.measured is not None
    return dataclasses.replace(cluster, measured=dataclasses.replace(cluster.measured, **host))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
