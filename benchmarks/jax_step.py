"""Time a training step of the JAX engine on one GPU, beside a hand-written JAX step of the same model and the torch engine.

    python -m benchmarks.jax_step --preset llama-1.5b --batch 4 --peer "python jax_base.py --size 1b --batch 4"

The peer is any command that prints a JSON line with `tok_s` and `peak_gib`. All run in turn, each in a process of its own.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time

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
    parser.add_argument(
        "--alone", choices=["jax", "scan", "torch"], help="measure this engine in this process, and print one line"
    )
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    import fullshard as fs
    from fullshard import on_jax
    from fullshard.model.presets import PRESETS
    from fullshard.on_jax.models import NnxLlama

    size = PRESETS[args.preset]
    make = lambda rngs: NnxLlama(size, rngs=rngs)
    shape, precision = fs.Batch(args.batch, args.sequence), fs.Precision(compute="bf16")
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
    found = {
        "tok_s": round(args.batch * args.sequence / seconds),
        "step_s": seconds,
        "compile_s": compiled,
        "peak_gib": peak / 2**30,
    }
    return found | {"compilations": on_jax.compilations(state)}


def measure_torch(args: argparse.Namespace) -> dict:
    import torch

    import fullshard as fs
    from fullshard import on_torch

    device = on_torch.start()
    model = on_torch.load_model(args.preset)
    shape, precision = fs.Batch(args.batch, args.sequence), fs.Precision(compute="bf16")
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
    return {"tok_s": round(args.batch * args.sequence / seconds), "step_s": seconds, "peak_gib": peak / 2**30}


def last_line(command: list[str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    args = arguments()
    if args.alone:
        print(json.dumps((measure_torch if args.alone == "torch" else measure)(args)), flush=True)
        return
    own = [sys.executable, "-m", "benchmarks.jax_step", "--preset", args.preset]
    own += ["--batch", str(args.batch), "--sequence", str(args.sequence), "--remat", args.remat, "--alone"]
    for _ in range(args.rounds):
        ours = last_line([*own, "jax"])
        peer = last_line(shlex.split(args.peer)) if args.peer else None
        ratio = ours["tok_s"] / peer["tok_s"] if peer else None
        scan = last_line([*own, "scan"]) if args.scan else None
        torch = last_line([*own, "torch"]) if args.torch else None
        print(json.dumps({"ours": ours, "scan": scan, "peer": peer, "ratio": ratio, "torch": torch}), flush=True)


if __name__ == "__main__":
    main()
