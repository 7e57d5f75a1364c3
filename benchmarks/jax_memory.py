"""Compare the memory of a JAX step on one GPU with two predictions: the planner's and XLA's own. `temporaries` and `bound` are
XLA's temporaries and the most that the plan can need, which the first step is held against.

    python -m benchmarks.jax_memory -o benchmarks/results/DATE-jax-memory-h200.json

Each case runs in a process of its own, since an allocator's peak cannot be reset. `--at-once 3` runs three at a time: their
memory, at most 120 GiB, must fit together.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

SEQUENCE = 2048


@dataclass(frozen=True)
class Case:
    preset: str
    batch: int
    remat: str = "none"
    loss: str = "chunked"
    accumulate: int = 1


CASES = [  # by size
    Case("llama-125m", 4, "full"),
    Case("llama-125m", 8, "full"),
    Case("llama-125m", 4, accumulate=4),
    Case("llama-125m", 8, "selective"),
    Case("llama-125m", 8),
    Case("llama-125m", 16, loss="plain"),
    Case("llama3.2-1b", 2, "full"),
    Case("llama-1.5b", 4, "selective"),
    Case("llama-1.5b", 4),
    Case("llama-3.6b", 4, "full"),
]
SMALL = [Case("llama-nano", 2), Case("llama-nano", 2, "full"), Case("llama-nano", 2, "none", "plain", 2)]


def measure(case: Case, sequence: int, device: str) -> dict:
    import jax
    import numpy as np

    import fullshard as fs
    from fullshard import on_jax
    from fullshard.model import presets
    from fullshard.on_jax.model.built_in import NnxLlama

    size = presets.PRESETS[case.preset]
    make = lambda rngs: NnxLlama(size, rngs=rngs)
    compute = "fp32" if device == "cpu" else "bf16"
    shape, precision = fs.Batch(case.batch, sequence, case.accumulate), fs.Precision(compute=compute)
    plan = fs.ddp(on_jax.describe(make), devices=1, remat=case.remat, batch=shape, precision=precision, compile=True)
    predicted = fs.estimate(plan, presets.describe(case.preset), fs.Cluster.load(f"1x{device}"), loss=case.loss, engine="jax")
    state = on_jax.shard(make, plan, fs.AdamW(lr=1e-4))
    ids = np.random.default_rng(0).integers(0, size.vocab, (case.batch, sequence + 1)).astype(np.int32)
    batches = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] * case.accumulate
    loss = on_jax.chunked_loss if case.loss == "chunked" else on_jax.summed_loss
    peak = lambda: (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    on_jax.train_step(state, batches, loss=loss, clip=1.0).loss.block_until_ready()
    xla = on_jax.lowered_step(state, batches, loss=loss).compile().memory_analysis()
    bound = sum(on_jax.memory_analysis(state, batches, loss=loss).bound.values())
    compiled = xla.argument_size_in_bytes + xla.output_size_in_bytes + xla.temp_size_in_bytes - xla.alias_size_in_bytes
    found = {"planner": predicted.device.allocated_bytes, "xla": compiled, "measured": peak() or None, "jax": jax.__version__}
    return found | {"temporaries": xla.temp_size_in_bytes, "bound": bound}


def run_alone(args: argparse.Namespace, index: int) -> dict:
    """The row of a case, from a process of its own that takes device memory as it needs it."""
    command = [sys.executable, "-m", "benchmarks.jax_memory", "--device", args.device, "--alone", str(index)]
    command += ["--small"] if args.small else []
    began = time.perf_counter()
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    case = asdict(cases(args)[index])
    found = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"error": done.stderr[-300:]}
    return case | found | {"seconds": time.perf_counter() - began}


def told(row: dict) -> str:
    what = f"{row['preset']} × {row['batch']} {row['remat']} {row['loss']} ×{row['accumulate']}"
    if "error" in row:
        return f"{what}: {row['error']}"
    of = row["measured"] or row["xla"]
    parts = ", ".join(f"{name} {row[name] / 2**30:.2f} GiB ({row[name] / of - 1:+.1%})" for name in ("planner", "xla"))
    return f"{what}: {of / 2**30:.2f} GiB{'' if row['measured'] else ' (by XLA)'}; {parts}; {row['seconds']:.0f} s"


def cases(args: argparse.Namespace) -> list[Case]:
    return SMALL if args.small else CASES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--device", default="h200", help="the planner's name of this device")
    parser.add_argument("--small", action="store_true", help="three tiny models, on any machine")
    parser.add_argument("--at-once", type=int, default=1, help="how many cases run at a time")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)  # this case, in this process
    args = parser.parse_args()
    sequence, rows = 16 if args.small else SEQUENCE, []
    if args.alone is not None:
        print(json.dumps(measure(cases(args)[args.alone], sequence, args.device)), flush=True)
        return
    with ThreadPoolExecutor(args.at_once) as pool:
        for row in pool.map(lambda index: run_alone(args, index), range(len(cases(args)))):
            rows.append(row)
            print(told(row), flush=True)
            if args.output:
                args.output.write_text(json.dumps({"sequence": sequence, "device": args.device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
