"""Time a training step of the JAX engine with its state in host memory, beside the resident step, on one GPU.

    python -m benchmarks.jax_homes --out homes.json                       # Llama 1.5B, 4 × 4096 tokens, full remat
    python -m benchmarks.jax_homes --remat selective --cases resident activations
    python -m benchmarks.jax_homes --small                                # on a CPU: a model of 100 thousand parameters

Each case runs in a process of its own, from the same seed and on the same tokens. Its losses must be those of the resident
case. The peak is the allocator's over all steps; on a CPU there is none. XLA's own numbers stand beside it: bytes of the
arguments and of temporaries, on the device and on the host. Pinned host memory comes from a pool that JAX limits to 64 GiB;
XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB changes that.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

WARM = 2
CASES = {
    "resident": {},
    "optimizer": {"optimizer": "host"},
    "params+optimizer": {"params": "host", "optimizer": "host"},
    "activations": {"activations": "host"},
    "all": {"params": "host", "optimizer": "host", "activations": "host"},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1.5b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--remat", default="full", choices=["none", "selective", "full"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a tiny model in fp32, for any machine")
    parser.add_argument("--out", type=Path, help="a file for all results as JSON")
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # this case, in this process
    args = parser.parse_args()
    if args.small:
        args.preset, args.batch, args.sequence, args.steps = "llama-nano", 2, 16, 2
    return args


def measure(args: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    import fullshard as fs
    from fullshard import on_jax
    from fullshard.model.presets import PRESETS
    from fullshard.on_jax.model.built_in import NnxLlama

    size = PRESETS[args.preset]
    make = lambda rngs: NnxLlama(size, rngs=rngs)
    shape, precision = fs.Batch(args.batch, args.sequence, args.accumulate), fs.Precision("fp32" if args.small else "bf16")
    home = fs.Home(**CASES[args.alone])
    plan = fs.zero3(on_jax.describe(make), devices=1, remat=args.remat, batch=shape, precision=precision, home=home)
    state = on_jax.shard(make, plan, fs.AdamW(lr=1e-4))
    ids = np.random.default_rng(0).integers(0, size.vocab, (args.batch, args.sequence + 1)).astype(np.int32)
    batches = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] * args.accumulate
    step = lambda: on_jax.train_step(state, batches, loss=on_jax.chunked_loss, clip=1.0).loss
    start = time.perf_counter()
    losses = [step()]
    losses[0].block_until_ready()
    compiled = time.perf_counter() - start
    losses += [step() for _ in range(WARM)]
    losses[-1].block_until_ready()
    start = time.perf_counter()
    losses += [step() for _ in range(args.steps)]
    losses[-1].block_until_ready()
    seconds = (time.perf_counter() - start) / args.steps
    stats = jax.devices()[0].memory_stats() or {}
    state.check()
    return {
        "case": args.alone,
        "tok_s": round(args.batch * args.sequence * args.accumulate / seconds),
        "step_s": seconds,
        "compile_s": compiled,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "device_bytes": state.held_bytes("device"),
        "host_bytes": state.held_bytes("host"),
        "xla": xla_bytes(state, batches),
        "losses": [float(x) for x in losses],
        "compilations": on_jax.compilations(state),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def xla_bytes(state, batches) -> dict:
    """What XLA says of the compiled step."""
    from fullshard import on_jax

    found = on_jax.lowered_step(state, batches, loss=on_jax.chunked_loss).compile().memory_analysis()
    kinds = ("argument", "output", "alias", "temp")
    names = [f"{place}{kind}_size_in_bytes" for place in ("", "host_") for kind in kinds]
    return {name.removesuffix("_size_in_bytes"): getattr(found, name) for name in names}


def run_alone(args: argparse.Namespace, case: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.jax_homes", "--alone", case, "--preset", args.preset, "--remat", args.remat]
    command += ["--batch", str(args.batch), "--sequence", str(args.sequence), "--accumulate", str(args.accumulate)]
    command += ["--steps", str(args.steps), *(["--small"] if args.small else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"case": case, "error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def report(results: list[dict]) -> str:
    from fullshard.base.text import bytes_text, table

    first = results[0]
    size = lambda n: "" if n is None else bytes_text(n)
    rows = []
    for r in results:
        if "error" in r:
            rows.append([r["case"], r["error"], *[""] * 6])
            continue
        apart = max(abs(a - b) for a, b in zip(r["losses"], first["losses"], strict=True)) if "losses" in first else None
        rows.append(
            [
                r["case"],
                f"{r['tok_s']}",
                f"{r['tok_s'] / first['tok_s']:.3f}" if "tok_s" in first else "",
                size(r["peak_bytes"]),
                size(sum(r["device_bytes"].values())),
                size(sum(r["host_bytes"].values())),
                size(r["xla"]["temp"]),
                "" if apart is None else f"{apart:.1e}",
            ]
        )
    header = ["case", "tokens/s", f"of {first['case']}", "peak", "state on device", "on host", "temporaries", "loss differs by"]
    return table(header, rows, right=range(1, 8))


def main() -> None:
    args = arguments()
    if args.alone:
        print(json.dumps(measure(args)), flush=True)
        return
    results = []
    for case in args.cases:
        results.append(run_alone(args, case))
        print(json.dumps(results[-1]), flush=True)
    print(report(results), flush=True)
    if args.out:
        about = {k: v for k, v in vars(args).items() if k not in ("out", "alone")}
        args.out.write_text(json.dumps({"arguments": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
