"""Predicted against measured seconds of a step, on one GPU that plays rank 0 of N (collectives take no time there).

    python -m benchmarks.time_error --out FOLDER

First times the machine (`measure`), then steps of each case: the median of nine, after three to warm up. `issue`
is how long the host took to issue a step. `paces` are the host's (a launch, and what remat does in Python), timed
between the same steps. On a shared machine they change by a third from one second to the next, and by less from one
minute to the next: predictions go by their middle over all cases. `predicted_by_file` is what the cluster's file says.
"""

import argparse
import dataclasses
import fnmatch
import json
import statistics
import time
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
from fullshard.on_torch.paces import middle, paces
from fullshard.planner.timeline import timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("time_error"))
    parser.add_argument("--only", default="*", help="names of cases, with wildcards")
    parser.add_argument("--no-predict", action="store_true", help="measure only")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cluster = on_torch.measure()
    cluster.save(args.out / "cluster.json")
    print(cluster, flush=True)
    about = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if fnmatch.fnmatch(case.name, args.only) and case.trained != "norms":
            rows.append(measure(case))
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "case"}), flush=True)
            (args.out / "time.json").write_text(json.dumps({**about, "rows": rows}, indent=1))
    if not args.no_predict:
        rows = predict_all(rows, cluster)
        (args.out / "time.json").write_text(json.dumps({**about, "rows": rows}, indent=1))


def predict_all(rows: list[dict[str, Any]], cluster: Cluster) -> list[dict[str, Any]]:
    """The rows with what is predicted of them, and a line each."""
    cases, found = {c.name: c for c in CASES}, []
    timed = [r["paces"] for r in rows if "paces" in r]
    host = middle(timed) if timed else {}
    for row in (r for r in rows if "failed" not in r):
        found.append(row | predict(cases[row["name"]], cluster, row["seconds"], host))
        told = f"{row['seconds']:.4f} s, predicted {found[-1]['predicted']:.4f}  {found[-1]['error']:+.1%}"
        print(f"{row['name']:32s} {told}", flush=True)
    errors = [abs(r["error"]) for r in found]
    print(f"mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}, {len(errors)} rows")
    return found + [r for r in rows if "failed" in r]


def measure(case: Case) -> dict[str, Any]:
    clean()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.devices)
    row: dict[str, Any] = {"name": case.name, "case": dataclasses.asdict(case)}
    try:
        row |= run_steps(case)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:500]
    dist.destroy_process_group()
    return row


def run_steps(case: Case) -> dict[str, Any]:
    model = build(case)
    plan = plan_of(case, on_torch.describe(model))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-5), init=initial, device="cuda", first_step_checks=False)
    vocab = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding)).num_embeddings
    ids = torch.randint(0, vocab, (case.accumulate, case.batch[0], case.batch[1] + 1))
    batches = [{"input_ids": i[:, :-1].contiguous(), "labels": i[:, 1:].contiguous()} for i in ids]
    loss = {"plain": on_torch.summed_loss, "chunked": on_torch.chunked_loss}[case.loss]
    found: list[tuple[float, float]] = []
    beside: list[dict[str, float]] = []
    for i in range(12):
        beside += [paces(torch.device("cuda"))] if i % 3 == 2 else []
        torch.cuda.synchronize()
        start = time.perf_counter()
        on_torch.train_step(state, batches, loss=loss, clip=1.0)
        issued = time.perf_counter()
        torch.cuda.synchronize()
        if i > 2:
            found.append((time.perf_counter() - start, issued - start))
    tensors = len(list(model.parameters()))
    return {
        "seconds": statistics.median(s for s, _ in found),
        "issue": statistics.median(i for _, i in found),
        "paces": middle(beside),
        "tensors": tensors,
        "units": len(plan.units),
    }


def predict(case: Case, cluster: Cluster, measured: float, host: dict[str, float]) -> dict[str, Any]:
    """What the planner says of this machine, with links that take no time and a host of the paces `host`."""
    description = on_torch.describe(build(case), micro_batch=case.batch[0], sequence=case.batch[1], compute=case.compute)
    plan = plan_of(case, description)
    by_file = timeline(plan, description, playing(cluster, case.devices), loss=case.loss, spread=0.0)
    found = timeline(plan, description, playing(paced(cluster, host), case.devices), loss=case.loss, spread=0.0)
    return {
        "predicted": found.seconds,
        "predicted_by_file": by_file.seconds,
        "error": found.seconds / measured - 1,
        "compute": found.compute,
        "host": found.busy["host"],
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
