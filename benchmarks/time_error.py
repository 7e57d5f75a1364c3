"""Predicted against measured seconds of a step, on one GPU that plays rank 0 of N (collectives take no time there).

    python -m benchmarks.time_error --out FOLDER
    python -m benchmarks.time_error --out FOLDER --only 'hf-*' 'gpt2-*' --no-predict
    python -m benchmarks.time_again FOLDER/time.json                # predicts what was measured, with no GPU

First times the machine (`measure`), then steps of each case, and predicts them by the cluster file. On a shared machine the
host is a half slower for seconds at a time, on one core and not on the next. So every step is issued from another core than
the one before, as `measure` goes over all of them; `seconds` are the mean of a case's steps without the quickest and the
slowest eighth. `felt` is how many times as long as the file's the host took beside these steps, by a clock that is none of
them. Predicted are a step by the file alone, and by the file when it is told what was felt.
"""

import argparse
import dataclasses
import fnmatch
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
from fullshard.on_torch.measuring.cores import Cores
from fullshard.on_torch.measuring.paces import issue_clock, share_of
from fullshard.on_torch.measuring.timings import middle
from fullshard.planner.timeline import timeline

WARM, LEAST = 3, 5  # steps before those that are timed, and the least of these
STEPS = 32  # that are timed, if that does not take longer than `--seconds`

Taken = tuple[float, float]  # seconds of a step, and until it was issued


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("time_error"))
    parser.add_argument("--only", nargs="+", default=["*"], help="names of cases, with wildcards")
    parser.add_argument("--seconds", type=float, default=4.0, help="after which a case has enough steps, once five are timed")
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
            print(json.dumps({k: v for k, v in rows[-1].items() if k not in ("case", "steps", "beside")}), flush=True)
            (out / "time.json").write_text(json.dumps({**about, "rows": rows}, indent=1))


def measure(case: Case, seconds: float, cluster: Cluster) -> dict[str, Any]:
    clean()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.devices)
    row: dict[str, Any] = {"name": case.name, "case": dataclasses.asdict(case)}
    try:
        row |= timed(case, seconds, (cluster.of("issued"), cluster.of("quiet")))
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:500]
    dist.destroy_process_group()
    return row


def timed(case: Case, seconds: float, pace: tuple[float, float]) -> dict[str, Any]:
    """A case's steps, and the host beside them by the cluster file's `issued` and `quiet`."""
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
    steps, beside = in_turn(step, clock, seconds)
    return {
        "tensors": len(list(model.parameters())),
        "units": len(plan.units),
        "seconds": middle([taken for taken, _ in steps]),
        "issue": middle([returned for _, returned in steps]),
        "felt": share_of(middle(beside), *pace),
        "steps": [taken for taken, _ in steps],
        "beside": [share_of(b, *pace) for b in beside],
    }


def in_turn(step: Callable[[], Taken], clock: Callable[[], float], seconds: float) -> tuple[list[Taken], list[float]]:
    """Steps, from one core after the other, and what the clock showed there, before and after."""
    steps: list[Taken] = []
    beside: list[float] = []
    began = time.perf_counter()
    with Cores(clock) as cores:
        while len(steps) < LEAST or (len(steps) < STEPS and time.perf_counter() - began < seconds):
            cores.move()
            before = cores.look()
            steps.append(step())
            beside.append((before + cores.look()) / 2)
    return steps, beside


# -- predicting ---------------------------------------------------------------------------------------


def predict_all(rows: list[dict[str, Any]], cluster: Cluster) -> list[dict[str, Any]]:
    """The rows with what is predicted of them, and a line each."""
    cases, found = {c.name: c for c in CASES}, []
    rows, failed = [r for r in rows if "failed" not in r], [r for r in rows if "failed" in r]
    for row in rows:
        found.append(row | predict(cases[row["name"]], cluster, row))
        told = f"{row['seconds']:.4f} s, predicted {found[-1]['predicted']:.4f}  {found[-1]['error']:+.1%}"
        others = f"told that the host is at {1 / row['felt']:.2f} of its pace: {found[-1]['error_told']:+.1%}"
        print(f"{row['name']:32s} {told}; {others}", flush=True)
    for kind in ("error", "error_told"):
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
        "predicted_told": then.seconds,
        "error_told": then.seconds / row["seconds"] - 1,
        "compute": own.compute,
        "host": own.busy["host"],
    }


def playing(cluster: Cluster, devices: int) -> Cluster:
    """One device of the cluster, as if it were one of many."""
    fast = dataclasses.replace(cluster.node.link, bandwidth=1e18, latency=1e-9, start=1e-9)
    return dataclasses.replace(cluster, devices=devices, node=dataclasses.replace(cluster.node, devices=devices, link=fast))


if __name__ == "__main__":
    main()
