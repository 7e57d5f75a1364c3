"""Compare the demo's loss with quantised collectives to that with plain ones, over several seeds.

    python -m benchmarks.wire_loss --ranks 4 --seeds 4
    python -m benchmarks.wire_loss --ranks 4 --seeds 128 --simulated

The demo's model and data, 200 steps, mean loss of the last ten. Training amplifies every difference: with one seed, runs that
differ in rounding alone end percents apart. So every seed, which draws the weights and orders the data, runs with each way of
communicating, and the mean of the relative differences is told with its standard error. On gloo ranks a run takes minutes;
`--simulated` computes all ranks of many seeds at once, on a GPU if there is one. Prints a JSON line for each run, then one for
each way of communicating.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fullshard as fs
from benchmarks.simulated_ranks import SimulatedRun
from fullshard import on_torch
from fullshard.data import Batches, TokenFile
from fullshard.data.pack_tokens import pack
from fullshard.launch.local import inside_ranks, start_ranks

WIRES = {
    "plain": fs.Wire(),
    "int8": fs.Wire("int8", "int8"),
    "int8-feedback": fs.Wire("int8", "int8", error_feedback=True),
    "int8-gather": fs.Wire("int8"),
    "int8-reduce": fs.Wire("plain", "int8"),
    "fp8": fs.Wire("fp8", "fp8"),
}
STEPS, LAST = 200, 10
TOGETHER = 32  # seeds that are simulated at once


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4, help="how many; each runs once with every wire")
    parser.add_argument("--first", type=int, default=0, help="the first seed; the demo has 0")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=["plain", "int8", "int8-feedback"])
    parser.add_argument("--simulated", action="store_true", help="on one device, all ranks of many seeds at once")
    parser.add_argument("--tokens", type=Path, help="packed text; the standard library's by default")
    return parser.parse_args()


@cache
def demo() -> Any:
    """The module examples/demo.py."""
    found = importlib.util.spec_from_file_location("demo", Path(__file__).parents[1] / "examples" / "demo.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def settings() -> fs.AdamW:
    return fs.AdamW(lr=demo().PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1)


def rate(step: int) -> float:
    """The demo's learning rate."""
    return float(demo().PEAK_LR * min(1.0, (step + 1) / 20) * max(0.05, 1 - step / STEPS))


def demo_losses(tokens: str | Path, wire: fs.Wire, steps: int = STEPS, seed: int = 0) -> list[float]:
    """Train the demo on these ranks with this wire; return its losses."""
    d, model = demo(), on_torch.load_model("llama-bytes")
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(d.MICRO_BATCH, d.SEQUENCE), wire=wire)
    state = on_torch.shard(model, plan, settings(), seed=seed)
    data = TokenFile(Path(tokens))
    feed = Batches(data, d.SEQUENCE, d.MICRO_BATCH, rank=on_torch.data_rank(plan.mesh), ranks=plan.mesh.data, seed=seed)
    return [step.loss.item() for step in fs.train(state, feed, steps=steps, clip=1.0, lr=rate)]


def simulated_losses(
    tokens: str | Path, wire: fs.Wire, ranks: int, seeds: list[int], steps: int = STEPS, device: str = "cpu"
) -> torch.Tensor:
    """The same losses, steps × seeds, with simulated ranks."""
    d = demo()
    run = SimulatedRun("llama-bytes", TokenFile(Path(tokens)), ranks, d.SEQUENCE, d.MICRO_BATCH, seeds, torch.device(device))
    return run.losses(wire, [rate(step) for step in range(steps)], settings(), clip=1.0)


def ends(args: argparse.Namespace, wire: fs.Wire) -> Iterator[tuple[int, float]]:
    """The seed and the last losses' mean of each run."""
    seeds = list(range(args.first, args.first + args.seeds))
    if not args.simulated:
        yield from ((seed, statistics.mean(demo_losses(args.tokens, wire, seed=seed)[-LAST:])) for seed in seeds)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for first in range(0, len(seeds), TOGETHER):
        some = seeds[first : first + TOGETHER]
        found = simulated_losses(args.tokens, wire, args.ranks, some, device=device)[-LAST:].mean(0)
        yield from zip(some, found.tolist(), strict=True)


def compared(name: str, found: dict[int, float], plain: dict[int, float]) -> dict[str, object]:
    """Runs with a wire beside plain ones with the same seeds."""
    more = [found[seed] / plain[seed] - 1 for seed in found]
    error = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else None
    return {
        "wire": name,
        "seeds": len(found),
        "mean": statistics.mean(found.values()),
        "above_plain": statistics.mean(more),
        "standard_error": error,
    }


def measure(args: argparse.Namespace) -> None:
    found: dict[str, dict[int, float]] = {}
    for name in args.wires:
        found[name] = {}
        for seed, loss in ends(args, WIRES[name]):
            found[name][seed] = loss
            show(args, {"wire": name, "seed": seed, "loss": round(loss, 5)})
    for name in found if "plain" in found else ():
        show(args, compared(name, found[name], found["plain"]))


def show(args: argparse.Namespace, row: dict[str, object]) -> None:
    if args.simulated or dist.get_rank() == 0:
        print(json.dumps({"ranks": args.ranks, "simulated": args.simulated, **row}), flush=True)


def main() -> None:
    args = arguments()
    if inside_ranks():
        on_torch.start()
        measure(args)
        on_torch.finish()
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.tokens is None:
            args.tokens = Path(folder) / "tokens"
            pack(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), args.tokens)
        if args.simulated:
            measure(args)
        else:
            start_ranks(args.ranks, ["-m", "benchmarks.wire_loss", *sys.argv[1:], "--tokens", str(args.tokens)])


if __name__ == "__main__":
    main()
