"""Compare the memory of a JAX step on one GPU with two predictions: the planner's, made for torch, and XLA's own.

    python -m benchmarks.jax_memory -o benchmarks/results/DATE-jax-memory-h200.json

The cases run in the order of their sizes: an allocator's peak cannot be reset, so each must rise above those before it.
"""

import argparse
import gc
import json
import time
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
    from fullshard.on_jax.models import NnxLlama

    size = presets.PRESETS[case.preset]
    make = lambda rngs: NnxLlama(size, rngs=rngs)
    compute = "fp32" if device == "cpu" else "bf16"
    shape, precision = fs.Batch(case.batch, sequence, case.accumulate), fs.Precision(compute=compute)
    plan = fs.ddp(on_jax.describe(make), devices=1, remat=case.remat, batch=shape, precision=precision, compile=True)
    predicted = fs.estimate(plan, presets.describe(case.preset), fs.Cluster.load(f"1x{device}"), loss=case.loss)
    state = on_jax.shard(make, plan, fs.AdamW(lr=1e-4))
    ids = np.random.default_rng(0).integers(0, size.vocab, (case.batch, sequence + 1)).astype(np.int32)
    batches = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] * case.accumulate
    loss = on_jax.chunked_loss if case.loss == "chunked" else on_jax.summed_loss
    peak = lambda: (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    before = peak()
    on_jax.train_step(state, batches, loss=loss, clip=1.0).loss.block_until_ready()
    xla = on_jax.lowered_step(state, batches, loss=loss).compile().memory_analysis()
    compiled = xla.argument_size_in_bytes + xla.output_size_in_bytes + xla.temp_size_in_bytes - xla.alias_size_in_bytes
    measured = peak() if peak() > before else None
    return {"planner": predicted.device.allocated_bytes, "xla": compiled, "measured": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--device", default="h200", help="the planner's name of this device")
    parser.add_argument("--small", action="store_true", help="three tiny models, on any machine")
    args = parser.parse_args()
    sequence, rows = 16 if args.small else SEQUENCE, []
    for case in SMALL if args.small else CASES:
        began = time.perf_counter()
        found = measure(case, sequence, args.device)
        gc.collect()
        rows.append(asdict(case) | found | {"seconds": time.perf_counter() - began})
        of = found["measured"] or found["xla"]
        told = ", ".join(f"{name} {found[name] / 2**30:.2f} GiB ({found[name] / of - 1:+.1%})" for name in ("planner", "xla"))
        what = f"{case.preset} × {case.batch} {case.remat} {case.loss} ×{case.accumulate}"
        print(f"{what}: {of / 2**30:.2f} GiB{'' if found['measured'] else ' (by XLA)'}; {told}", flush=True)
        if args.output:
            args.output.write_text(json.dumps({"sequence": sequence, "device": args.device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
