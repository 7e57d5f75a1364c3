"""Compare the demo's loss with quantised collectives to that with plain ones, and to the spread of plain runs.

    python -m benchmarks.wire_loss --ranks 4 --factors 1 1.001 0.999

The demo's model, data and seeds, 200 steps, mean loss of the last ten. Training amplifies every difference: two runs whose
learning rates differ by a thousandth end apart. So each way of communicating runs once for each factor on the learning rate,
and means are compared. Prints a JSON line for each run, then one with the means.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.data import Batches, TokenFile
from fullshard.data.pack import pack
from fullshard.launch.local import inside_ranks, torchrun

WIRES = {
    "plain": fs.Wire(),
    "int8": fs.Wire("int8", "int8"),
    "int8-feedback": fs.Wire("int8", "int8", error_feedback=True),
    "fp8": fs.Wire("fp8", "fp8"),
}
LAST = 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[1, 1.001, 0.999], help="on the learning rate, a run for each"
    )
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=["plain", "int8", "int8-feedback"])
    parser.add_argument("--tokens", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def demo() -> Any:
    """The module examples/demo.py."""
    found = importlib.util.spec_from_file_location("demo", Path(__file__).parents[1] / "examples" / "demo.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def demo_losses(tokens: str | Path, wire: fs.Wire, steps: int, factor: float = 1.0) -> list[float]:
    """Train the demo on these ranks with this wire and a learning rate times `factor`; return its losses."""
    d, model = demo(), on_torch.load_model("llama-bytes")
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(d.MICRO_BATCH, d.SEQUENCE), wire=wire)
    state = on_torch.shard(model, plan, fs.AdamW(lr=d.PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1), seed=d.SEED)
    data = TokenFile(Path(tokens))
    feed = Batches(data, d.SEQUENCE, d.MICRO_BATCH, rank=on_torch.data_rank(plan.mesh), ranks=plan.mesh.data, seed=d.SEED)
    rate = lambda i: factor * d.PEAK_LR * min(1.0, (i + 1) / 20) * max(0.05, 1 - i / steps)
    return [step.loss.item() for step in fs.train(state, feed, steps=steps, clip=1.0, lr=rate)]


def main() -> None:
    args = arguments()
    if not inside_ranks():
        with tempfile.TemporaryDirectory() as folder:
            tokens = Path(folder) / "tokens"
            pack(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), tokens)
            torchrun(args.ranks, ["-m", "benchmarks.wire_loss", *sys.argv[1:], "--tokens", str(tokens)])
    on_torch.start()
    found: dict[str, list[float]] = {}
    for name in args.wires:
        for factor in args.factors:
            losses = demo_losses(args.tokens, WIRES[name], args.steps, factor)
            found.setdefault(name, []).append(statistics.mean(losses[-LAST:]))
            if dist.get_rank() == 0:
                print(json.dumps({"ranks": args.ranks, "wire": name, "factor": factor, "loss": found[name][-1]}), flush=True)
    if dist.get_rank() == 0:
        means = {name: statistics.mean(losses) for name, losses in found.items()}
        spread = statistics.stdev(found["plain"]) / means["plain"] if len(found.get("plain", ())) > 1 else None
        print(json.dumps({"ranks": args.ranks, "means": means, "spread_of_plain": spread}), flush=True)
    on_torch.finish()


if __name__ == "__main__":
    main()
