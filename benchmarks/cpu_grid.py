"""Predicted against measured seconds of a step on CPU ranks, and the search's pick against the best that was run.

    python benchmarks/cpu_grid.py                 # 2 gloo ranks, about two minutes

The ranks that train also measure the machine, before, between and after, and of every number the fastest counts. Every
plan of a small grid takes turns in one process group, so that noise hits all alike; a plan's time is the mean of its
fastest third.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

import fullshard as fs
from fullshard import on_torch, presets
from fullshard.launch.local import inside_ranks, torchrun
from fullshard.planner.timeline import timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preset", default="llama-bytes")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a rank in a step")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not inside_ranks():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(args.ranks, [__file__, *sys.argv[1:]])
    on_torch.start("cpu")
    description = presets.describe(args.preset)
    plans = grid(description, args)
    measured, clusters = run(plans, args)
    if on_torch.is_first():
        report(plans, measured, description, quietest(clusters), args)
    on_torch.finish()


def grid(description: fs.Description, args: argparse.Namespace) -> dict[str, fs.Plan]:
    """Strategies × remat × micro-batch."""
    choices = itertools.product(("ddp", "zero1", "zero2", "zero3"), ("none", "full"), (args.rows // 2, args.rows))
    return {
        f"{strategy} {remat} {micro}": fs.strategy(
            strategy,
            description,
            devices=args.ranks,
            batch=fs.Batch(micro, args.sequence, args.rows // micro),
            remat=remat,
        )
        for strategy, remat, micro in choices
    }


def run(plans: dict[str, fs.Plan], args: argparse.Namespace) -> tuple[dict[str, float], list[fs.Cluster]]:
    """Seconds of each plan's steps, and what the machine was like in the meantime."""
    states = {
        name: on_torch.shard(on_torch.load_model(args.preset), plan, fs.AdamW(lr=1e-4), first_step_checks=False)
        for name, plan in plans.items()
    }
    times: dict[str, list[float]] = {name: [] for name in plans}
    clusters = []
    for i in range(args.rounds + 1):
        if i % (args.rounds // 2) == 0:
            clusters.append(on_torch.measure())
        for name, state in states.items():
            batches = [batch(args, plans[name]) for _ in range(plans[name].batch.accumulate)]
            start = time.perf_counter()
            float(on_torch.train_step(state, batches, loss=on_torch.chunked_loss, clip=1.0).loss)
            times[name].append(time.perf_counter() - start)
    return {name: fastest(found[1:]) for name, found in times.items()}, clusters


def quietest(clusters: list[fs.Cluster]) -> fs.Cluster:
    """Of every number the fastest: what else ran on the machine only ever added."""
    found = [c.measured for c in clusters if c.measured]
    best: dict[str, Any] = {n: max(getattr(m, n) for m in found) for n in ("hbm", "pointwise", "dram")}
    best |= {n: min(getattr(m, n) for m in found) for n in ("launch", "adamw")}
    best["gemms"] = tuple(min(same, key=lambda g: g.seconds) for same in zip(*[m.gemms for m in found], strict=True))
    best["attention"] = tuple(
        replace(same[0], forward=max(a.forward for a in same), backward=max(a.backward for a in same))
        for same in zip(*[m.attention for m in found], strict=True)
    )
    size = 1 << 20  # bytes, about a unit of the grid's model
    best["collectives"] = tuple(
        min(same, key=lambda c: c.latency + size / c.bandwidth) for same in zip(*[m.collectives for m in found], strict=True)
    )
    return replace(clusters[0], measured=replace(found[0], **best))


def batch(args: argparse.Namespace, plan: fs.Plan) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (plan.batch.micro_batch, args.sequence + 1))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def fastest(times: list[float]) -> float:
    return statistics.mean(sorted(times)[: max(1, len(times) // 3)])


def report(
    plans: dict[str, fs.Plan],
    measured: dict[str, float],
    description: fs.Description,
    cluster: fs.Cluster,
    args: argparse.Namespace,
) -> None:
    rows = []
    for name, plan in plans.items():
        predicted = timeline(plan, description, cluster, spread=0.0).seconds
        rows.append({"plan": name, "measured": measured[name], "predicted": predicted, "error": predicted / measured[name] - 1})
        print(f"{name:20s} measured {measured[name] * 1e3:7.1f} ms predicted {predicted * 1e3:7.1f} {rows[-1]['error']:+.1%}")
    errors = [abs(float(r["error"])) for r in rows]
    pick = min(rows, key=lambda r: float(r["predicted"]))
    best = min(measured.values())
    over = measured[str(pick["plan"])] / best
    print(f"mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}; the pick, {pick['plan']}: {over:.3f} of the best")
    if args.out:
        about = {"hardware": f"{os.cpu_count()} cores", "torch": torch.__version__, "python": platform.python_version()}
        found = {**about, "date": str(date.today()), "rows": rows, "pick": pick["plan"], "over_best": over}
        found["cluster"] = cluster.to_dict()
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
