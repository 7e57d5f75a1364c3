"""Predict and run every plan of a small grid on one device, and compare the search's pick with the fastest plan.

    python -m benchmarks.gpu_grid                                   # one GPU, about two minutes: Llama 1.5B, 4 × 4,096
    python -m benchmarks.gpu_grid --preset llama-bytes --sequence 64 --device cpu     # does it run at all

Measures the machine, searches under a memory limit that excludes some plans, then runs all plans: remat × micro-batch ×
home of the optimizer state. Prints JSON lines: the cluster, one row per plan, the verdict. A plan fits if its reserved
memory is within the limit. The best plan is the fastest that fits. `predicted_then` is the prediction with the host's
speed between the plans: `host_share` is the factor by which it differs from the cluster's.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from typing import Any

import torch

import fullshard as fs
from benchmarks.cpu_grid import batch
from benchmarks.memory_error import initial
from fullshard import on_torch
from fullshard.base.text import parse_bytes
from fullshard.cluster.topology import Cluster
from fullshard.model import presets
from fullshard.on_torch.measuring.host_time import host_share
from fullshard.planner.estimate import Estimate, estimate

WARM = 2  # steps before those that are timed
ABOVE = 1.02  # the limit, as a factor of what half of the resident plans need: none of them is near it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1.5b")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="sequences per step")
    parser.add_argument("--limit", help="device memory, such as 24GiB; by default half of the resident plans fit")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each plan, after two to warm up")
    parser.add_argument("--seconds", type=float, default=110.0, help="start no plan later than this")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began = time.monotonic()
    on_torch.start(args.device)
    cluster = on_torch.measure(quick=True)
    print_row({"cluster": cluster.to_dict(), "torch": torch.__version__})
    rows = Grid(args, cluster, began).run()
    print_row(verdict(rows))
    on_torch.finish()


def print_row(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


class Grid:
    """The plans, their predictions, and the memory limit."""

    def __init__(self, args: argparse.Namespace, cluster: fs.Cluster, began: float):
        self.args, self.cluster, self.began = args, cluster, began
        self.description = presets.describe(args.preset)
        self.plans = dict(self._grid())
        predicted = {name: self._estimate(plan) for name, plan in self.plans.items()}
        resident = [e.needed for name, e in predicted.items() if name.endswith("device")]
        self.limit = parse_bytes(args.limit) if args.limit else int(ABOVE * statistics.median(resident))
        self.predicted = {name: self._estimate(plan) for name, plan in self.plans.items()}

    limit: int | None = None

    def _precision(self) -> fs.Precision:
        return fs.Precision(compute="bf16" if self.cluster.device.kind == "cuda" else "fp32")

    def _grid(self) -> Any:
        """(name, plan) pairs. Plans without offload come first, because the others take longer to set up."""
        micros = [n for n in (1, 2, 4) if self.args.rows % n == 0]
        for home, remat, micro in itertools.product(("device", "host"), ("none", "selective", "full"), micros):
            plan = fs.zero3(
                self.description,
                devices=1,
                precision=self._precision(),
                batch=fs.Batch(micro, self.args.sequence, self.args.rows // micro),
                remat=remat,
                home=fs.Home(optimizer=home),  # type: ignore[arg-type]
            )
            yield f"{remat} {micro} {home}", plan

    def _estimate(self, plan: fs.Plan) -> Estimate:
        return estimate(plan, self.description, self.cluster, limit=self.limit)

    def search(self) -> tuple[str, fs.Plan]:
        """The search's pick and its name: that of the same plan in the grid, or `pick`."""
        found = fs.find_plan(
            self.description,
            self.cluster,
            sequence=self.args.sequence,
            global_batch=self.args.rows,
            limit=self.limit,
            fix={"compile": False},
            disk=False,
        )
        same = [name for name, plan in self.plans.items() if same_program(plan, found.plan)]
        name = same[0] if same else "pick"
        print_row({"limit": self.limit, "pick": name, "search_seconds": found.search_seconds, "plan": str(found.plan)})
        self.predicted.setdefault(name, found.estimate)
        return name, found.plan

    def run(self) -> list[dict[str, Any]]:
        """Run all plans, the pick first. Returns one row per plan."""
        pick, plan = self.search()
        rows = []
        for name, one in {pick: plan, **self.plans}.items():
            row: dict[str, Any] = {"plan": name, "pick": name == pick, **prediction_row(self.predicted[name])}
            row["fits"] = row["predicted_fits"]  # replaced if the device's memory is measured
            if time.monotonic() - self.began > self.args.seconds:
                row["skipped"] = "no time left"
            else:
                row |= self._measured(one)
            rows.append(row)
            print_row(row)
        return self._predict_with_host(rows, {pick: plan, **self.plans})

    def _predict_with_host(self, rows: list[dict[str, Any]], plans: dict[str, fs.Plan]) -> list[dict[str, Any]]:
        """Add to the rows that ran the prediction with the measured speed of the host."""
        ran = [r for r in rows if "measured" in r]
        cluster = self.cluster.with_host(statistics.median(r["host_share"] for r in ran))
        for row in ran:
            then = estimate(plans[row["plan"]], self.description, cluster, limit=self.limit)
            row["predicted_then"] = then.step_seconds
            print_row({key: row[key] for key in ("plan", "measured", "predicted", "predicted_then")})
        return rows

    def _measured(self, plan: fs.Plan) -> dict[str, Any]:
        try:
            found = run(plan, self.args, self.cluster)
        except torch.OutOfMemoryError as error:
            return {"failed": str(error)[:200]}
        assert self.limit is not None
        return found | ({"fits": found["reserved"] <= self.limit} if "reserved" in found else {})


def same_program(one: fs.Plan, other: fs.Plan) -> bool:
    """True if two plans for one device are the same program. Their strategies do not matter there."""
    parts = [[(u.remat, u.home) for u in p.units] for p in (one, other)]
    return parts[0] == parts[1] and one.batch == other.batch and one.compile == other.compile


def prediction_row(found: Estimate) -> dict[str, Any]:
    return {"predicted": found.step_seconds, "predicted_reserved": found.needed, "predicted_fits": found.fits}


def run(plan: fs.Plan, args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Run a plan. Returns its step time, the host's speed before and after it, and its reserved memory. Nothing runs between
    the steps, because offloaded updates of one step overlap with the next."""
    began = time.perf_counter()
    state = on_torch.shard(
        on_torch.load_model(args.preset), plan, fs.AdamW(lr=1e-5), init=initial, device=args.device, first_step_checks=False
    )
    try:
        return timed(state, args, cluster) | {"seconds": time.perf_counter() - began}
    finally:
        if state.offload:
            state.offload.close()
            state.offload.memory.close()  # frees pinned memory before the next plan
        del state
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def timed(state: on_torch.State, args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    plan, cuda = state.plan, args.device == "cuda"
    batches = [batch(args, plan) for _ in range(plan.batch.accumulate)]
    host = cluster.of("issued"), cluster.of("quiet")
    times, host_shares = [], [host_share(*host, state.device)]
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for i in range(WARM + args.steps):
        start = time.perf_counter()
        on_torch.train_step(state, batches, loss=on_torch.chunked_loss, clip=1.0).numbers()
        times += [time.perf_counter() - start] if i >= WARM else []
    start = time.perf_counter()
    state.flush()  # updates that would overlap with the next forward
    flushed = time.perf_counter() - start
    host_shares.append(host_share(*host, state.device))
    reserved = {"reserved": torch.cuda.max_memory_reserved()} if cuda else {}
    return {"measured": statistics.median(times), "host_share": statistics.mean(host_shares), "flush": flushed, **reserved}


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The errors of the predictions, and the pick's time relative to the best plan's."""
    ran = [r for r in rows if "measured" in r]
    errors = [abs(r["predicted_then"] / r["measured"] - 1) for r in ran]
    fitting = [r for r in ran if r["fits"]]
    picked = next((r for r in ran if r["pick"]), None)
    if not fitting or picked is None:
        return {"verdict": "nothing fits, or the pick did not run", "rows": len(ran)}
    best = min(fitting, key=lambda r: r["measured"])
    return {
        "rows": len(ran),
        "skipped": len(rows) - len(ran),
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "pick": picked["plan"],
        "pick_fits": picked["fits"],
        "best": best["plan"],
        "pick_over_best": picked["measured"] / best["measured"],
    }


if __name__ == "__main__":
    main()
