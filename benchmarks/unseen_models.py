"""Compare predicted with measured memory and step time of models that no fitted number comes from, on one GPU.

    python -m benchmarks.unseen_models --out FOLDER                  # all, within eight minutes
    python -m benchmarks.unseen_models --only 'vit-l' 'qwen3*'       # some, with wildcards
    python -m benchmarks.unseen_models --tiny --out FOLDER           # tiny shapes on a CPU: whether everything runs

Each configuration runs in a process of its own, as rank 0 of N in a fake process group. Processes predict at the same time and
measure one after the other. `allocated` is the peak of the third step, `reserved` the peak since the model was sharded,
`seconds` the median of the steps after it. Collectives of the fake group take no time, and none is predicted.

Writes `unseen_models.json` to FOLDER, by default to $OUT. A row says what its peak is made of, measured and as planned (`peak`,
`planned_peak`: bytes by kind, and the largest blocks), and its milliseconds by kind of kernel (`milliseconds`, beside
`compute`, the planner's seconds). A configuration that fails or finds no time is a row that says so.
"""

import argparse
import fcntl
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard as fs
from benchmarks import peak_blocks
from benchmarks.any_model import started
from benchmarks.resident_step import gemm, profile
from benchmarks.time_error import as_one_of
from benchmarks.unseen_cases import CASES, UnseenCase
from fullshard import on_torch
from fullshard.cluster.topology import Cluster
from fullshard.on_torch.ranks.device_presets import local_cluster
from fullshard.planner.memory.peak_memory import predict as predict_memory
from fullshard.planner.time.timeline import timeline

WARM, STEPS, SECONDS = 3, 10, 4.0  # the most timed steps, and the most seconds of them
AT_ONCE = 8
LOSSES = {"plain": on_torch.summed_loss, "chunked": on_torch.chunked_loss}
Row = dict[str, Any]


# -- one configuration in its own process ----------------------------------------------------------------


def describe(case: UnseenCase) -> fs.Description:
    if case.batch is None:
        return on_torch.describe(case.build(), micro_batch=case.rows, sequence=case.tokens)
    return on_torch.describe(case.build(), example=case.batch(case.rows), loss=case.loss)


def plan_of(case: UnseenCase, found: fs.Description) -> fs.Plan:
    batch = fs.Batch(case.rows, case.tokens, case.accumulate) if case.batch is None else found.batch(accumulate=case.accumulate)
    how: dict[str, Any] = {"remat": case.remat, "compile": case.compile, "batch": batch}
    return fs.strategy(case.strategy, found, **case.mesh, precision=fs.Precision(compute="bf16"), **how)


def predict(case: UnseenCase, cluster: Cluster) -> tuple[fs.Plan, Row]:
    """The plan, and what the planner expects of it."""
    began = time.perf_counter()
    found = describe(case)
    traced = time.perf_counter() - began
    plan = plan_of(case, found)
    loss = "chunked" if case.batch is None and found.costs and found.costs.vocabulary else "plain"
    memory = predict_memory(plan, found, loss=loss)
    seconds = timeline(plan, found, as_one_of(cluster, plan.mesh.devices), loss=loss, spread=0.0)
    return plan, {
        "loss": loss,
        "parameters": found.numel,
        "units": len(plan.units),
        "trace_seconds": round(traced, 2),
        "predicted_allocated": memory.allocated,
        "predicted_reserved": memory.reserved,
        "predicted_seconds": seconds.seconds,
        "phase": memory.phase,
        "terms": dict(memory.terms),
        "compute": seconds.compute,
        "lanes": seconds.busy,
        "planned_peak": peak_blocks.planned_peak(plan, found, loss),
    }


def batches_of(case: UnseenCase, model: nn.Module) -> list[Any]:
    if case.batch is not None:
        return [case.batch(case.rows) for _ in range(case.accumulate)]
    vocabulary = next(m for m in model.modules() if isinstance(m, nn.Embedding)).num_embeddings
    ids = torch.randint(0, vocabulary, (case.accumulate, case.rows, case.tokens + 1))
    return [{"input_ids": i[:, :-1].contiguous(), "labels": i[:, 1:].contiguous()} for i in ids]


def measure(case: UnseenCase, plan: fs.Plan, named: str) -> Row:
    """Memory and seconds of real steps, then what both are made of."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = case.build()
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-5), init=started, device=device, first_step_checks=False)
    batches, loss = batches_of(case, model), case.loss or LOSSES[named]
    step = lambda: on_torch.train_step(state, batches, loss=loss, clip=1.0)
    if device == "cpu":
        return {"losses": [step().loss.item() for _ in range(2)]}
    row: Row = {"kernels": state.kernels, **memory_of(step), **seconds_of(step)}
    row["peak"] = recorded_peak(step)
    row["milliseconds"] = profile(step)
    return row


def memory_of(step: Any) -> Row:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    at_rest, began = torch.cuda.memory_allocated(), time.perf_counter()
    reserved = 0
    for _ in range(WARM):
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        reserved = max(reserved, torch.cuda.max_memory_reserved())
    row: Row = {"allocated": torch.cuda.max_memory_allocated(), "reserved": reserved, "at_rest": at_rest}
    row["reserved_by_stream"] = reserved_by_stream()
    return row | {
        "warm_seconds": round(time.perf_counter() - began, 1),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def reserved_by_stream() -> list[int]:
    """Bytes of the allocator's segments, a number for each stream; the first is that of computation."""
    found: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        found[segment["stream"]] = found.get(segment["stream"], 0) + segment["total_size"]
    return [found[stream] for stream in sorted(found)]


def seconds_of(step: Any) -> Row:
    steps: list[float] = []
    while len(steps) < STEPS and sum(steps) < SECONDS:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - start)
    return {"seconds": statistics.median(steps), "steps": steps}


def recorded_peak(step: Any) -> Row:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with peak_blocks.recorded() as trace:
        step()
        torch.cuda.synchronize()
        return peak_blocks.measured_peak(trace(), before)


def run_here(name: str, tiny: bool, folder: Path) -> None:
    case = CASES[name].tiny() if tiny else CASES[name]
    row: Row = {"name": name, "why": case.why}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.devices)
    try:
        plan, expected = predict(case, Cluster.load(folder / "cluster.json"))
        row |= expected
        with (folder / "gpu.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            row |= measure(case, plan, row["loss"])
        for kind in ("allocated", "reserved", "seconds"):
            if kind in row:
                row[f"error_{kind}"] = row[f"predicted_{kind}"] / row[kind] - 1
    except Exception as error:
        row |= {"failed": f"{type(error).__name__}: {error}"[:1000], "traceback": traceback.format_exc()[-4000:]}
    (folder / f"{name}.json").write_text(json.dumps(row))


# -- the command ------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "unseen_models")))
    parser.add_argument("--only", nargs="+", default=["*"], help="names of configurations, with wildcards")
    parser.add_argument("--measure", action="store_true", help="measure this machine first; else its preset is used")
    parser.add_argument("--seconds", type=float, default=480, help="the time that all of them have")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU too")
    parser.add_argument("--list", action="store_true", help="print the configurations")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.list:
        print("\n".join(f"{name:20s} {case.why}" for name, case in CASES.items()))
        return
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a GPU; --tiny runs without one")
    if args.one:
        run_here(args.one, args.tiny, args.out)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_all(args, Path(folder))


def run_all(args: argparse.Namespace, folder: Path) -> None:
    end = time.monotonic() + args.seconds
    cluster = on_torch.measure() if args.measure else local_cluster(1)
    cluster.save(folder / "cluster.json")
    about: Row = {"torch": torch.__version__, "transformers": metadata.version("transformers"), "date": str(date.today())}
    about |= {"measured": cluster.to_dict()["measured"]} if args.measure else {}
    if torch.cuda.is_available():
        about |= {"hardware": torch.cuda.get_device_name(), "gemm_tflops": gemm()}
        torch.cuda.empty_cache()
    names = [n for n in CASES if any(fnmatch.fnmatch(n, pattern) for pattern in args.only)]
    rows: list[Row] = []
    with ThreadPoolExecutor(2 if args.tiny else AT_ONCE) as pool:
        for row in pool.map(lambda name: run_apart(name, args.tiny, folder, end), names):
            rows.append(row)
            print(line(row), flush=True)
            (args.out / "unseen_models.json").write_text(json.dumps({**about, "rows": rows}))
    for kind in ("allocated", "reserved", "seconds"):
        if errors := [abs(r[f"error_{kind}"]) for r in rows if f"error_{kind}" in r]:
            print(f"{kind}: mean {statistics.mean(errors):.2%}, worst {max(errors):.2%}, {len(errors)} models")


def run_apart(name: str, tiny: bool, folder: Path, end: float) -> Row:
    left = end - time.monotonic()
    if left < 10:
        return {"name": name, "failed": "not run: no time was left"}
    command = [sys.executable, "-m", "benchmarks.unseen_models", "--one", name, "--out", str(folder)]
    command += ["--tiny"] if tiny else []
    file = folder / f"{name}.json"
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {"name": name, "failed": f"ended after {left:.0f} s: no time was left"}
    if not file.exists():
        return {"name": name, "failed": f"exit code {done.returncode}: {done.stderr[-1000:]}"}
    return json.loads(file.read_text())


def line(row: Row) -> str:
    if "failed" in row:
        return f"{row['name']:20s} failed: {row['failed'][:300]}"
    if "allocated" not in row:
        return f"{row['name']:20s} ran; losses {row['losses']}  traced in {row['trace_seconds']:.1f} s"
    text = f"{row['name']:20s} allocated {row['allocated'] / 2**30:7.3f} reserved {row['reserved'] / 2**30:7.3f} GiB"
    text += f"  step {1000 * row['seconds']:8.2f} ms  predicted {row['error_allocated']:+.2%} {row['error_reserved']:+.2%}"
    return f"{text} {row['error_seconds']:+.1%}  traced in {row['trace_seconds']:.1f} s, warm in {row['warm_seconds']:.1f} s"


if __name__ == "__main__":
    main()
