"""Predicted against measured seconds of a step, on one GPU that plays rank 0 of N (collectives take no time there).

    python -m benchmarks.time_error --out FOLDER
    python -m benchmarks.time_error --out FOLDER --only 'hf-*' 'gpt2-*' --no-predict
    python -m benchmarks.time_again FOLDER/time.json                # predicts what was measured, with no GPU

First times the machine (`measure`), then steps of each case, and predicts them by the cluster file. On a shared machine the
host is a half slower for seconds at a time, on one core and not on the next; so each case is timed twice:

- `seconds`: on a core that is undisturbed before and after the step, by a clock that is none of the step (`quiet`), as the
  file's paces are. The median of at least five steps, and of as many as take `--seconds`.
- `anywhere`: wherever the host runs it, of a few steps right before; `felt` is how many times as long as the file's the host
  took beside them, by the same clock, which the prediction is told.
"""

import argparse
import dataclasses
import fnmatch
import itertools
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
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
from fullshard.on_torch.measuring.paces import issue_clock, share_of
from fullshard.on_torch.measuring.quiet import Quiet
from fullshard.planner.timeline import timeline

WARM, STEPS = 3, 5  # steps before those that are timed, and the least of these
ANYWHERE = 3, 0.5  # steps wherever the host runs them: so many, and of so many seconds
PATIENCE = 8.0  # seconds to wait for a quiet host, a case

Taken = tuple[float, float]  # seconds of a step, and until it was issued


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("time_error"))
    parser.add_argument("--only", nargs="+", default=["*"], help="names of cases, with wildcards")
    parser.add_argument("--seconds", type=float, default=1.0, help="of steps that are timed, at least")
    parser.add_argument("--no-predict", action="store_true", help="measure only")
    args = parser.parse_args()
    measure_all(args.out, args.only, args.seconds)
    if not args.no_predict:
        table = json.loads((args.out / "time.json").read_text())
        table["rows"] = predict_all(table["rows"], Cluster.load(args.out / "cluster.json"))
        (args.out / "time.json").write_text(json.dumps(table, indent=1))


# -- measuring ----------------------------------------------------------------------------------------


def measure_all(out: Path, only: list[str], seconds: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    cluster = on_torch.measure()
    cluster.save(out / "cluster.json")
    print(cluster, flush=True)
    about = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    about["cluster"] = cluster.to_dict()["measured"]
    rows = []
    for case in CASES:
        if any(fnmatch.fnmatch(case.name, o) for o in only) and case.trained != "norms":
            rows.append(measure(case, seconds, cluster))
            print(json.dumps({k: v for k, v in rows[-1].items() if k not in ("case", "steps")}), flush=True)
            (out / "time.json").write_text(json.dumps({**about, "rows": rows}, indent=1))


def measure(case: Case, seconds: float, cluster: Cluster) -> dict[str, Any]:
    clean()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.devices)
    row: dict[str, Any] = {"name": case.name, "case": dataclasses.asdict(case)}
    try:
        row |= timed(case, seconds, cluster.of("issued"))
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:500]
    dist.destroy_process_group()
    return row


def timed(case: Case, seconds: float, issued: float) -> dict[str, Any]:
    """A case's steps, and the host beside them by the cluster file's `issued`."""
    model = build(case)
    plan = plan_of(case, on_torch.describe(model))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-5), init=initial, device="cuda", first_step_checks=False)
    vocab = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding)).num_embeddings
    ids = torch.randint(0, vocab, (case.accumulate, case.batch[0], case.batch[1] + 1))
    batches = [{"input_ids": i[:, :-1].contiguous(), "labels": i[:, 1:].contiguous()} for i in ids]
    loss = {"plain": on_torch.summed_loss, "chunked": on_torch.chunked_loss}[case.loss]

    def step() -> Taken:
        torch.cuda.synchronize()
        start = time.perf_counter()
        on_torch.train_step(state, batches, loss=loss, clip=1.0)
        returned = time.perf_counter()
        torch.cuda.synchronize()
        return time.perf_counter() - start, returned - start

    clock = issue_clock(torch.device("cuda"))
    for _ in range(WARM):
        step()
    anywhere, felt = as_it_comes(step, clock)
    steps, kept, best = quietly(step, clock, seconds)
    return {
        "tensors": len(list(model.parameters())),
        "units": len(plan.units),
        "seconds": statistics.median(taken for taken, _ in kept or steps),
        "issue": statistics.median(returned for _, returned in kept or steps),
        "quiet": [len(kept), len(steps)],
        "best": share_of(best, issued),
        "anywhere": statistics.median(taken for taken, _ in anywhere),
        "felt": share_of(statistics.median(felt), issued),
        "steps": [taken for taken, _ in kept or steps],
    }


def as_it_comes(step: Callable[[], Taken], clock: Callable[[], float]) -> tuple[list[Taken], list[float]]:
    """Steps wherever the host runs them, and of each the clock, before and after."""
    steps: list[Taken] = []
    felt = [clock()]
    while not enough(steps, *ANYWHERE):
        steps.append(step())
        felt.append(clock())
    return steps, [(before + after) / 2 for before, after in itertools.pairwise(felt)]


def quietly(step: Callable[[], Taken], clock: Callable[[], float], seconds: float) -> tuple[list[Taken], list[Taken], float]:
    """All steps, those between two looks at a quiet host, and the clock at its best."""
    steps: list[Taken] = []
    kept: list[Taken] = []
    end = time.perf_counter() + PATIENCE
    with Quiet(clock) as quiet:
        while not enough(kept, STEPS, seconds) and (len(steps) < STEPS or time.perf_counter() < end):
            before = quiet.settle()
            steps.append(step())
            if quiet.is_quiet(before) and quiet.is_quiet(quiet.look()):
                kept.append(steps[-1])
    return steps, kept, quiet.best


def enough(steps: list[Taken], least: int, seconds: float) -> bool:
    return len(steps) >= least and sum(taken for taken, _ in steps) >= seconds


# -- predicting ---------------------------------------------------------------------------------------


def predict_all(rows: list[dict[str, Any]], cluster: Cluster) -> list[dict[str, Any]]:
    """The rows with what is predicted of them, and a line each."""
    cases, found = {c.name: c for c in CASES}, []
    rows, failed = [r for r in rows if "failed" not in r], [r for r in rows if "failed" in r]
    for row in rows:
        found.append(row | predict(cases[row["name"]], cluster, row))
        told = f"{row['seconds']:.4f} s, predicted {found[-1]['predicted']:.4f}  {found[-1]['error']:+.1%}"
        others = f"anywhere, the host at {1 / row['felt']:.2f} of its pace: {found[-1]['error_anywhere']:+.1%}"
        print(f"{row['name']:32s} {told}; {others}", flush=True)
    for kind in ("error", "error_anywhere", "error_anywhere_by_file"):
        errors = [abs(r[kind]) for r in found]
        print(f"{kind}: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}, {len(errors)} rows")
    return found + failed


def predict(case: Case, cluster: Cluster, row: dict[str, Any]) -> dict[str, Any]:
    """What the planner says of this machine, with links that take no time; and with the host as it was felt."""
    description = on_torch.describe(build(case), micro_batch=case.batch[0], sequence=case.batch[1], compute=case.compute)
    plan = plan_of(case, description)
    own, then = (
        timeline(plan, description, playing(at, case.devices), loss=case.loss, spread=0.0)
        for at in (cluster, cluster.with_host(row["felt"]))
    )
    return {
        "predicted": own.seconds,
        "error": own.seconds / row["seconds"] - 1,
        "predicted_anywhere": then.seconds,
        "error_anywhere": then.seconds / row["anywhere"] - 1,
        "error_anywhere_by_file": own.seconds / row["anywhere"] - 1,
        "compute": own.compute,
        "host": own.busy["host"],
    }


def playing(cluster: Cluster, devices: int) -> Cluster:
    """One device of the cluster, as if it were one of many."""
    fast = dataclasses.replace(cluster.node.link, bandwidth=1e18, latency=1e-9, start=1e-9)
    return dataclasses.replace(cluster, devices=devices, node=dataclasses.replace(cluster.node, devices=devices, link=fast))


if __name__ == "__main__":
    main()
