"""Compare predicted with measured step times on CPU ranks, and the search's pick with the fastest plan.

    python benchmarks/cpu_grid.py                 # 2 gloo ranks, about two minutes on an idle machine

A round measures the machine and runs one step of every plan, all in one process group. A measurement or step does not
count if other programs used more than 5% of the cores meanwhile. Rounds repeat until enough of them count. A plan's time
is the mean of its fastest third, as for kernels. Each number of the cluster is the median of the measurements that
count, because the load of a shared machine changes.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.launch.local import inside_ranks, start_ranks
from fullshard.model import presets
from fullshard.on_torch.measuring.timings import fastest
from fullshard.planner.time.timeline import timeline

MAX_OTHER_LOAD = 0.05  # share of the cores; what is timed under more load does not count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preset", default="llama-bytes")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--rounds", type=int, default=6, help="steps of each plan that must count")
    parser.add_argument("--minutes", type=float, default=9.0, help="at most")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not inside_ranks():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        start_ranks(args.ranks, [__file__, *sys.argv[1:]])
    on_torch.start("cpu")
    description = presets.describe(args.preset)
    plans = grid(description, args)
    measured, cluster, about = run(plans, args)
    if on_torch.is_first():
        report(plans, measured, description, cluster, args, about)
    on_torch.finish()


def grid(description: fs.Description, args: argparse.Namespace) -> dict[str, fs.Plan]:
    """The plans by name: strategies × remat × micro-batch."""
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


def run(plans: dict[str, fs.Plan], args: argparse.Namespace) -> tuple[dict[str, float], fs.Cluster, dict[str, Any]]:
    """Returns the step time of each plan, the measured cluster, and how many steps and measurements counted."""
    states = {
        name: on_torch.shard(on_torch.load_model(args.preset), plan, fs.AdamW(lr=1e-4), first_step_checks=False)
        for name, plan in plans.items()
    }
    times: dict[str, list[float]] = {name: [] for name in plans}
    clusters: list[tuple[float, fs.Cluster]] = []
    taken, end = 0, time.monotonic() + 60 * args.minutes
    for name, state in states.items():
        step(state, plans[name], args)
    while first_rank_says(time.monotonic() < end and (count_quiet(clusters) == 0 or min(map(len, times.values())) < args.rounds)):
        with OtherLoad() as load:
            found = on_torch.measure(quick=True)
        clusters.append((load.share, found))
        for name, state in states.items():
            with OtherLoad() as load:
                seconds = step(state, plans[name], args)
            taken += 1
            times[name] += [seconds] if load.share < MAX_OTHER_LOAD else []
    if not count_quiet(clusters) or not all(times.values()):
        raise SystemExit(
            f"other programs used the cores all the time: {count_quiet(clusters)} of {len(clusters)} measurements count"
        )
    about = {"steps": taken, "steps_that_count": sum(map(len, times.values())), "measurements": len(clusters)}
    about |= {"measurements_that_count": count_quiet(clusters)}
    cluster = fs.Cluster.from_dict(
        median_tree([json.loads(json.dumps(c.to_dict())) for share, c in clusters if share < MAX_OTHER_LOAD])
    )
    return {name: fastest(found) for name, found in times.items()}, cluster, about


def median_tree(found: list[Any]) -> Any:
    """The median of each number in JSON trees of the same form; of anything else, the first tree's value."""
    first = found[0]
    if isinstance(first, dict):
        return {key: median_tree([f[key] for f in found]) for key in first}
    if isinstance(first, list) and all(len(f) == len(first) for f in found):
        return [median_tree(list(each)) for each in zip(*found, strict=True)]
    if isinstance(first, float) or (isinstance(first, int) and not isinstance(first, bool)):
        return type(first)(statistics.median(found))
    return first


def step(state: on_torch.State, plan: fs.Plan, args: argparse.Namespace) -> float:
    batches = [batch(args, plan) for _ in range(plan.batch.accumulate)]
    start = time.perf_counter()
    float(on_torch.train_step(state, batches, loss=on_torch.chunked_loss, clip=1.0).loss)
    return time.perf_counter() - start


class OtherLoad:
    """Measures the share of the machine's cores that other programs use inside the context. The same on all ranks."""

    share = 0.0

    def __enter__(self) -> "OtherLoad":
        dist.barrier()
        self.start = (busy_seconds(), time.process_time(), time.perf_counter())
        return self

    def __exit__(self, *_: object) -> None:
        own = torch.tensor(time.process_time() - self.start[1], dtype=torch.float64)
        all_busy, wall = busy_seconds() - self.start[0], time.perf_counter() - self.start[2]
        dist.all_reduce(own)
        found = torch.tensor((all_busy - float(own)) / (wall * (os.cpu_count() or 1)), dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self.share = float(found)


def busy_seconds() -> float:
    """The busy time of all cores since boot, in seconds."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def count_quiet(clusters: list[tuple[float, fs.Cluster]]) -> int:
    return sum(share < MAX_OTHER_LOAD for share, _ in clusters)


def first_rank_says(go: bool) -> bool:
    """Rank 0's value of `go`, on all ranks: their clocks may differ."""
    value = torch.tensor(int(go))
    dist.broadcast(value, 0)
    return bool(value)


def batch(args: argparse.Namespace, plan: fs.Plan) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (plan.batch.micro_batch, args.sequence + 1))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def report(
    plans: dict[str, fs.Plan],
    measured: dict[str, float],
    description: fs.Description,
    cluster: fs.Cluster,
    args: argparse.Namespace,
    counted: dict[str, Any],
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
    print(counted)
    print(f"mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}; the pick, {pick['plan']}: {over:.3f} of the best")
    if args.out:
        about = {"hardware": f"{os.cpu_count()} cores", "torch": torch.__version__, "python": platform.python_version()}
        found = {**about, "date": str(date.today()), "rows": rows, "pick": pick["plan"], "over_best": over}
        found |= {**counted, "cluster": cluster.to_dict()}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
