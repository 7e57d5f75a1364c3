"""Time a resident training step on one GPU, each kernel's share of it, and peers beside it in the same run.

    python -m benchmarks.resident_step --preset llama-1.5b --batch 4 --each --profile \\
        --peer "python fsdp2_base.py --size 1b --batch 4 --compile" --peer "python floor.py 1b 4"

Every row is a process of its own. `--each`: also with each of the plan's kernels chosen otherwise, with FSDP's copies of whole
shards, and with all of these. `--layers N`: the first N blocks of a preset whose state does not fit. `--float8 KIND`: in float8,
too. `--cluster FILE`: also the step time that the planner predicts for this cluster. A peer is any command that prints a JSON
line with `tok_s` and `peak_gib`. GEMM: 8192³ in bf16, in the first process, as the ceiling.

    python -m benchmarks.resident_step --preset llama3-8b --layers 8 --batch 2 --float8 tensorwise
"""

import argparse
import json
import re
import shlex
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.jax_step import last_line

# What `--each` changes: kernels of the plan, and whether gathers and gradients of whole shards are copied twice, as FSDP does.
OTHERWISE = ("loss=torch", "update=torch", "attention=flash", "copies=fsdp")
WARM, STEPS, PROFILED = 3, 10, 3
KINDS = {  # by the first pattern that a kernel's name has
    "convolution": "implicit_gemm|conv(?!ert)|dgrad|wgrad|winograd|nhwc|nchw",
    "attention": "attention|flash|cudnn.*(fprop|bprop)|sdpa|fmha|mha",
    "gemm": "gemm|nvjet|cutlass|cublas|splitK",
    "loss": "_loss_and_gradient|softmax|nll|scatter|gather",
    "update": "adam|_update",
    "norm": "lpnorm|LpNorm|norm_cleanup",
    "copies": "copy|cat|Memcpy|fill|split",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1.5b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--remat", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "zero3"], help="on one GPU, whether parameters are freed")
    parser.add_argument("--float8", choices=["tensorwise", "rowwise"], help="also a row in float8, beside the one in bf16")
    parser.add_argument("--layers", type=int, help="cut the preset to so many blocks, for a model whose state does not fit")
    parser.add_argument("--eager", action="store_true", help="compile no block")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--profile", action="store_true", help="milliseconds by kind of kernel")
    parser.add_argument("--alone", action="store_true", help="measure in this process, and print one line")
    parser.add_argument("--cluster", help="a file of `fullshard measure`, or a name, to predict the step time for")
    parser.add_argument("--with", dest="choices", default="", help=f"with --alone: changes, of {', '.join(OTHERWISE)}")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    import fullshard as fs
    from fullshard import on_torch
    from fullshard.on_torch.private.fsdp_groups import GatherGroup

    choices = dict(pair.split("=") for pair in args.choices.split(",") if pair)
    if choices.pop("copies", None):
        GatherGroup.copy_once = lambda self, computed: None
    torch.manual_seed(0)
    device = on_torch.start()
    model = load(args.preset, args.layers)
    shape, precision = fs.Batch(args.batch, args.sequence), fs.Precision(compute="bf16", float8=args.float8)
    make, more = getattr(fs, args.strategy), {"compile": not args.eager, "kernels": fs.Kernels(**choices)}
    plan = make(on_torch.describe(model), devices=1, remat=args.remat, batch=shape, precision=precision, **more)
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-4))
    ids = torch.randint(0, model.size.vocab, (args.batch, args.sequence + 1), device=device)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    step = lambda: on_torch.train_step(state, [batch], loss=on_torch.chunked_loss, clip=1.0)
    losses = [step().loss.item() for _ in range(WARM)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(STEPS - 1):
        step()
    losses.append(step().loss.item())
    seconds = (time.perf_counter() - start) / STEPS
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    found = {"tok_s": round(args.batch * args.sequence / seconds), "step_s": seconds, "peak_gib": peak / 2**30, "losses": losses}
    found["kernels"] = state.kernels
    if args.cluster and args.layers is None:
        expected = fs.estimate(plan, fs.presets.describe(args.preset), fs.Cluster.load(args.cluster), clip=True)
        found |= {"predicted_s": expected.step_seconds, "predicted_gib": expected.device.allocated_bytes / 2**30}
    if args.profile and device.type == "cuda":
        found["milliseconds"] = profile(step)
    if device.type == "cuda":
        found["gemm_tflops"] = gemm()
    return found


def load(preset: str, layers: int | None) -> Any:
    """The preset on meta, with its first `layers` blocks if that is given."""
    from dataclasses import replace

    import torch

    from fullshard import on_torch
    from fullshard.model.presets import LlamaSize
    from fullshard.model.presets import preset as size_of
    from fullshard.on_torch.model.built_in import GPT, Llama

    if layers is None:
        return on_torch.load_model(preset)
    size = replace(size_of(preset), layers=layers)
    with torch.device("meta"):
        return Llama(size) if isinstance(size, LlamaSize) else GPT(size)


def profile(step: Any) -> dict[str, Any]:
    """Milliseconds of a step's kernels by kind, and the longest of each."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED - 1):
            step()
        step().loss.item()
    kinds: Counter[str] = Counter()
    longest: dict[str, Counter[str]] = {}
    for event in profiler.key_averages():
        milliseconds = event.device_time_total / 1000 / PROFILED
        kind = next((k for k, pattern in KINDS.items() if re.search(pattern, event.key)), "pointwise")
        kinds[kind] += milliseconds
        longest.setdefault(kind, Counter())[f"{event.count // PROFILED} × {event.key[:120]}"] += milliseconds
    rounded = {kind: round(value, 2) for kind, value in kinds.most_common()}
    return {
        **idle([(e.time_range.start, e.time_range.end, e.name) for e in profiler.events()]),
        "kinds": rounded,
        "longest": {k: [(n, round(v, 2)) for n, v in c.most_common(12)] for k, c in longest.items()},
    }


def idle(spans: list[tuple[float, float, str]]) -> dict[str, Any]:
    """Milliseconds a step in which no kernel ran, from spans in microseconds, and between which kernels most of them lie."""
    gaps: Counter[str] = Counter()
    end, before = min(begin for begin, _, _ in spans), ""
    for begin, stop, name in sorted(spans):
        if begin > end:
            gaps[f"{before[:60]} → {name[:60]}"] += (begin - end) / 1000 / PROFILED
        if stop > end:
            end, before = stop, name
    return {"idle": round(sum(gaps.values()), 2), "gaps": [(n, round(v, 3)) for n, v in gaps.most_common(12)]}


def gemm(size: int = 8192, times: int = 20) -> float:
    """TFLOP/s of a square product in bf16."""
    import torch

    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        a @ a
    torch.cuda.synchronize()
    return round(2 * size**3 * times / (time.perf_counter() - start) / 1e12, 1)


def main() -> None:
    args = arguments()
    if args.alone:
        print(json.dumps(measure(args)), flush=True)
        return
    own = [sys.executable, "-m", "benchmarks.resident_step", "--preset", args.preset, "--strategy", args.strategy, "--alone"]
    own += ["--batch", str(args.batch), "--sequence", str(args.sequence), "--remat", args.remat]
    own += (["--profile"] if args.profile else []) + (["--eager"] if args.eager else [])
    own += ["--layers", str(args.layers)] if args.layers else []
    own += ["--cluster", args.cluster] if args.cluster else []
    plain = last_line(own)
    print(json.dumps({"row": "fullshard", **plain}), flush=True)
    if args.float8:
        rounded = last_line([*own, "--float8", args.float8])
        both = plain.get("step_s"), rounded.get("step_s")
        faster = {"faster": round(both[0] / both[1], 3)} if all(both) else {}
        print(json.dumps({"row": f"float8 {args.float8}", **faster, **rounded}), flush=True)
    for change in [*OTHERWISE, ",".join(OTHERWISE)] if args.each else []:
        print(json.dumps({"row": f"with {change}", **last_line([*own, "--with", change])}), flush=True)
    for peer in args.peer:
        print(json.dumps({"row": peer, **last_line(shlex.split(peer))}), flush=True)


if __name__ == "__main__":
    main()
