"""Time a training step of the JAX engine on one GPU, beside a hand-written JAX step of the same model and the torch engine.

    python -m benchmarks.jax_step --preset llama-1.5b --batch 4 --torch --peer "python jax_base.py --size 1b --batch 4"
    python -m benchmarks.jax_step --small --torch                         # on a CPU: a tiny model in fp32

The peer is any command that prints a JSON line with `tok_s` and `peak_gib`. All run in turn, each in a process of its own.
Beside the peak of the JAX engine stand XLA's own number and the planner's.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

WARM, STEPS = 2, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1.5b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--scan", action="store_true", help="measure the JAX engine with scanned layers as well")
    parser.add_argument("--remat", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--peer", help="a command that prints the peer's JSON line")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--torch", action="store_true", help="measure the torch engine, compiled, as well")
    parser.add_argument("--small", action="store_true", help="a tiny model in fp32, for any machine")
    parser.add_argument("--out", type=Path, help="a file for all rounds as JSON")
    parser.add_argument(
        "--alone", choices=["jax", "scan", "torch"], help="measure this engine in this process, and print one line"
    )
    args = parser.parse_args()
    if args.small:
        args.preset, args.batch, args.sequence, args.rounds = "llama-nano", 2, 16, 1
    return args


def measure(args: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    import fullshard as fs
    from fullshard import on_jax
    from fullshard.model import presets
    from fullshard.on_jax.model.built_in import NnxLlama

    size = presets.PRESETS[args.preset]
    make = lambda rngs: NnxLlama(size, rngs=rngs)
    shape, precision = fs.Batch(args.batch, args.sequence), fs.Precision(compute="fp32" if args.small else "bf16")
    plan = fs.ddp(on_jax.describe(make), devices=1, remat=args.remat, batch=shape, precision=precision)
    state = on_jax.shard(make, plan, fs.AdamW(lr=1e-4), scan=args.alone == "scan")
    ids = np.random.default_rng(0).integers(0, size.vocab, (args.batch, args.sequence + 1)).astype(np.int32)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    step = lambda: on_jax.train_step(state, [batch], loss=on_jax.chunked_loss, clip=1.0)
    start = time.perf_counter()
    step().loss.block_until_ready()
    compiled = time.perf_counter() - start
    for _ in range(WARM):
        step()
    step().loss.block_until_ready()
    start = time.perf_counter()
    for _ in range(STEPS - 1):
        step()
    step().loss.block_until_ready()
    seconds = (time.perf_counter() - start) / STEPS
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    memory = on_jax.memory_analysis(state, [batch], loss=on_jax.chunked_loss, description=presets.describe(args.preset))
    found = {
        "tok_s": round(args.batch * args.sequence / seconds),
        "step_s": seconds,
        "compile_s": compiled,
        "peak_gib": peak / 2**30,
        "xla_gib": memory.peak / 2**30,
        "planner_gib": memory.estimate.allocated / 2**30,
    }
    return found | {"compilations": on_jax.compilations(state), "jax": jax.__version__}


def measure_torch(args: argparse.Namespace) -> dict:
    import torch

    import fullshard as fs
    from fullshard import on_torch

    device = on_torch.start()
    model = on_torch.load_model(args.preset)
    shape, precision = fs.Batch(args.batch, args.sequence), fs.Precision(compute="fp32" if args.small else "bf16")
    plan = fs.ddp(on_torch.describe(model), devices=1, remat=args.remat, batch=shape, precision=precision, compile=True)
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-4))
    ids = torch.randint(0, model.size.vocab, (args.batch, args.sequence + 1), device=device)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    step = lambda: on_torch.train_step(state, [batch], loss=on_torch.chunked_loss, clip=1.0)
    for _ in range(WARM + 1):
        step()
    step().loss.item()
    start = time.perf_counter()
    for _ in range(STEPS - 1):
        step()
    step().loss.item()
    seconds = (time.perf_counter() - start) / STEPS
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    found = {"tok_s": round(args.batch * args.sequence / seconds), "step_s": seconds, "peak_gib": peak / 2**30}
    return found | {"torch": torch.__version__}


def last_line(command: list[str]) -> dict:
    """The JSON line that a command prints last, with the seconds that all of it took; else its last words."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.splitlines()[-1]) | {"wall_s": round(time.perf_counter() - start, 1)}


def one_round(args: argparse.Namespace) -> dict:
    own = [sys.executable, "-m", "benchmarks.jax_step", "--preset", args.preset, "--batch", str(args.batch)]
    own += ["--sequence", str(args.sequence), "--remat", args.remat, *(["--small"] if args.small else []), "--alone"]
    found = {"ours": last_line([*own, "jax"])}
    others = {"scan": [*own, "scan"] if args.scan else None, "peer": shlex.split(args.peer) if args.peer else None}
    others["torch"] = [*own, "torch"] if args.torch else None
    for name, command in others.items():
        if command:
            found[name] = last_line(command)
            print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    rate = found["ours"].get("tok_s")
    return found | {f"of_{name}": rate / found[name]["tok_s"] for name in others if rate and "tok_s" in found.get(name, {})}


def main() -> None:
    args = arguments()
    if args.alone:
        print(json.dumps((measure_torch if args.alone == "torch" else measure)(args)), flush=True)
        return
    rounds = []
    for _ in range(args.rounds):
        rounds.append(one_round(args))
        print(json.dumps(rounds[-1]), flush=True)
        if args.out:
            about = {k: v for k, v in vars(args).items() if k not in ("out", "alone")}
            args.out.write_text(json.dumps({"arguments": about, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
