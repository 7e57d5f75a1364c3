"""Every plan of a small grid, predicted and run on one device, and the search's pick against the best that was run.

    python -m benchmarks.gpu_grid                                   # one GPU, about two minutes: Llama 1.5B, 4 × 4,096
    python -m benchmarks.gpu_grid --preset llama-bytes --sequence 64 --device cpu     # does it run at all

Times the machine, searches under a limit that not all plans keep to, then runs them all: remat × micro-batch ×
where the optimizer's state rests. JSON lines: the cluster, a row a plan, the verdict. A plan fits if what it reserved
keeps to the limit; the best is the fastest that fits, among those the pick. `predicted_then` goes by the host as it was
between the plans, which took so many times as long as the cluster's (`host_share`).
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
from fullshard.cluster.cluster import Cluster
from fullshard.model import presets
from fullshard.planner.estimate import Estimate, estimate
from fullshard.text import parse_bytes

WARM = 2
ABOVE = 1.02  # of what half of the resident plans need: none of them is on the edge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1.5b")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step")
    parser.add_argument("--limit", help="bytes of the device, as 24GiB; by default what half of the resident plans keep to")
    parser.add_argument("--steps", type=int, default=4, help="of each plan, after two to warm up")
    parser.add_argument("--seconds", type=float, default=110.0, help="start no plan later than this")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began = time.monotonic()
    on_torch.start(args.device)
    cluster = on_torch.measure(quick=True)
    tell({"cluster": cluster.to_dict(), "torch": torch.__version__})
    rows = Grid(args, cluster, began).run()
    tell(verdict(rows))
    on_torch.finish()


def tell(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


class Grid:
    """The plans, what is predicted of them, and a limit."""

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
        """What rests on the device first: the others take longer to set up."""
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
        """The pick, by its name in the grid if it is there."""
        found = fs.find_plan(
            self.description,
            self.cluster,
            sequence=self.args.sequence,
            global_batch=self.args.rows,
            limit=self.limit,
            fix={"compile": False},
            disk=False,
        )
        same = [name for name, plan in self.plans.items() if alike(plan, found.plan)]
        name = same[0] if same else "pick"
        tell({"limit": self.limit, "pick": name, "search_seconds": found.search_seconds, "plan": str(found.plan)})
        self.predicted.setdefault(name, found.estimate)
        return name, found.plan

    def run(self) -> list[dict[str, Any]]:
        """A row a plan, the pick's first."""
        pick, plan = self.search()
        rows = []
        for name, one in {pick: plan, **self.plans}.items():
            row: dict[str, Any] = {"plan": name, "pick": name == pick, **told(self.predicted[name])}
            row["fits"] = row["predicted_fits"]  # unless the device has counted
            if time.monotonic() - self.began > self.args.seconds:
                row["skipped"] = "no time left"
            else:
                row |= self._measured(one)
            rows.append(row)
            tell(row)
        return self._then(rows, {pick: plan, **self.plans})

    def _then(self, rows: list[dict[str, Any]], plans: dict[str, fs.Plan]) -> list[dict[str, Any]]:
        """The rows that ran with what is predicted of them by the host's pace between them."""
        ran = [r for r in rows if "measured" in r]
        cluster = self.cluster.with_host(statistics.median(r["host_share"] for r in ran))
        for row in ran:
            then = estimate(plans[row["plan"]], self.description, cluster, limit=self.limit)
            row["predicted_then"] = then.step_seconds
            tell({key: row[key] for key in ("plan", "measured", "predicted", "predicted_then")})
        return rows

    def _measured(self, plan: fs.Plan) -> dict[str, Any]:
        try:
            found = run(plan, self.args, self.cluster)
        except torch.OutOfMemoryError as error:
            return {"failed": str(error)[:200]}
        assert self.limit is not None
        return found | ({"fits": found["reserved"] <= self.limit} if "reserved" in found else {})


def alike(one: fs.Plan, other: fs.Plan) -> bool:
    """Whether two plans of one device are the same program; a strategy alone makes no difference there."""
    parts = [[(u.remat, u.home) for u in p.units] for p in (one, other)]
    return parts[0] == parts[1] and one.batch == other.batch and one.compile == other.compile


def told(found: Estimate) -> dict[str, Any]:
    return {"predicted": found.step_seconds, "predicted_reserved": found.needed, "predicted_fits": found.fits}


def run(plan: fs.Plan, args: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Seconds of a step, the host before and after by the cluster's pace, and the most that was reserved. Nothing comes
    between steps, which the updates of one that run under the next would use."""
    began = time.perf_counter()
    state = on_torch.shard(
        on_torch.load_model(args.preset), plan, fs.AdamW(lr=1e-5), init=initial, device=args.device, first_step_checks=False
    )
    batches = [batch(args, plan) for _ in range(plan.batch.accumulate)]
    cuda = args.device == "cuda"
    pace = cluster.of("issued"), cluster.of("quiet")
    times, beside = [], [on_torch.host_share(*pace, state.device)]
    try:
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for i in range(WARM + args.steps):
            start = time.perf_counter()
            on_torch.train_step(state, batches, loss=on_torch.chunked_loss, clip=1.0).numbers()
            times += [time.perf_counter() - start] if i >= WARM else []
        start = time.perf_counter()
        state.flush()  # updates that were to run under the next forward
        flushed = time.perf_counter() - start
        beside.append(on_torch.host_share(*pace, state.device))
        reserved = {"reserved": torch.cuda.max_memory_reserved()} if cuda else {}
        return {
            "measured": statistics.median(times),
            "host_share": statistics.mean(beside),
            "flush": flushed,
            "seconds": time.perf_counter() - began,
            **reserved,
        }
    finally:
        if state.tiers:
            state.tiers.close()
            state.tiers.memory.close()  # or the next plan's pinned memory comes on top of this one's
        del state, batches
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far predictions were off, and the pick from the best."""
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
