"""Compare the loop of `fullshard train` with a hand-written one that does the same work, in one process group.

    python -m benchmarks.loop_overhead                      # 2 gloo ranks, CPU, the demo's size

A step of either loop reads its batch from the same token file, trains with AdamW, clipping and a schedule, waits for the
loss and writes a JSON line. The hand-written loop uses stock `fully_shard`, a memory map and numpy. A second copy of it
runs too: the difference between the two copies is the machine's noise. Steps of all loops alternate.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.step_overhead import about, bare_model, undisturbed
from fullshard import on_torch
from fullshard.data import Order
from fullshard.data.pack_tokens import pack
from fullshard.engine.ranks import watched_ranks
from fullshard.launch.local import inside_ranks, start_ranks
from fullshard.runs.checkpointing import Checkpoints
from fullshard.runs.metrics import open_metrics
from fullshard.runs.prepare.prepare import prepare
from fullshard.runs.prepare.recipe_plan import make_optimizer
from fullshard.runs.profiling import Profiling
from fullshard.runs.progress import Bar
from fullshard.runs.recipe.recipe import Recipe, make_recipe
from fullshard.runs.run import Run
from fullshard.runs.stop_signals import Signals
from fullshard.runs.watchdog import Watchdog

LR, WARMUP, FINAL, CLIP = 2e-3, 20, 0.1, 1.0
Step = Callable[[int], object]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-bytes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument(
        "--loss", default="chunked", choices=["chunked", "plain"], help="fullshard's loss; the hand-written loop's is plain"
    )
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--warm", type=int, default=5)
    return parser.parse_args()


def by_hand(args: argparse.Namespace, device: torch.device, tokens: Path, lines: Path, steps: int) -> Step:
    """The step of a loop written without fullshard."""
    args.compute, args.compile = "fp32", False
    model = bare_model(args, device)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    source = np.memmap(tokens / "00000.tokens", np.uint8, "r")
    samples = shuffled(len(source), args, steps)
    file = lines.open("a") if dist.get_rank() == 0 else None

    def step(index: int) -> None:
        start = time.perf_counter()
        first = (index * dist.get_world_size() + dist.get_rank()) * args.batch
        rows = [int(s) * args.sequence for s in samples[first : first + args.batch]]
        ids = torch.from_numpy(np.stack([source[r : r + args.sequence + 1] for r in rows]).astype(np.int64))
        for group in optimizer.param_groups:
            group["lr"] = scheduled(index, steps)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        numbers = {"step": index + 1, "loss": loss.item(), "grad_norm": norm.full_tensor().item(), "lr": scheduled(index, steps)}
        if file:
            seconds = time.perf_counter() - start
            file.write(json.dumps({**numbers, "seconds": seconds, "tokens_per_second": ids.numel() / seconds}) + "\n")
            file.flush()

    return step


def shuffled(tokens: int, args: argparse.Namespace, steps: int) -> list[int]:
    """The samples of all steps, in fullshard's order, so that both loops read the same."""
    order = Order((tokens - 1) // args.sequence, 0, True)
    return [order[i] for i in range(steps * args.batch * dist.get_world_size())]


def scheduled(index: int, steps: int) -> float:
    if index < WARMUP:
        return LR * (index + 1) / WARMUP
    done = (index - WARMUP + 1) / (steps - WARMUP)
    return LR * (FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * done)))


def through_fullshard(args: argparse.Namespace, recipe: Recipe, directory: Path) -> Step:
    """The step of a run as `fullshard train` makes it. The progress bar is off, as without a terminal."""
    prepared = prepare(recipe, args.ranks)
    state = on_torch.shard(prepared.model, prepared.plan, make_optimizer(recipe), seed=recipe.train.seed)
    metrics = open_metrics(directory if on_torch.is_first() else None, recipe)
    bar = Bar(recipe.steps, visible=False)
    watchdog = Watchdog(directory, recipe.train.hang_seconds, watched_ranks(prepared.engine.ranks))
    checkpoints = Checkpoints(prepared, state, directory, metrics, bar)
    profiling = Profiling(prepared, state, directory, bar.say)
    run = Run(prepared, state, metrics, bar, Signals(), checkpoints, watchdog, profiling)
    run.restore(None, None)
    steps = run.trained_steps()
    return lambda index: next(steps)


def make(args: argparse.Namespace, tokens: Path, steps: int) -> Recipe:
    tree = {
        "model": {"name": args.preset},
        "data": {"path": str(tokens), "sequence": args.sequence},
        "optim": {"lr": LR, "clip": CLIP},
        "schedule": {"kind": "cosine", "warmup": WARMUP, "final": FINAL},
        "train": {"steps": steps, "global_batch": args.batch * args.ranks, "micro_batch": args.batch, "loss": args.loss},
    }
    return make_recipe(tree, "the benchmark's recipe")


def measure(args: argparse.Namespace, here: Path) -> dict:
    device = on_torch.start("cpu")
    steps, tokens = args.warm + args.rounds, here / "tokens"
    if dist.get_rank() == 0:
        pack(sorted(Path(json.__file__).parents[1].glob("*.py"))[:80], tokens, workers=1)
    dist.barrier()
    sides = {
        "hand": by_hand(args, device, tokens, here / "hand.jsonl", steps),
        "fullshard": through_fullshard(args, make(args, tokens, steps), here),
        "hand_again": by_hand(args, device, tokens, here / "again.jsonl", steps),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    generator = random.Random(0)  # the same on all ranks
    for index in range(steps):
        for name in generator.sample(list(sides), len(sides)):  # in random order
            found = timed(sides[name], index)
            if index >= args.warm:
                times[name].append(found)
    clocks = {"wall": {n: [t[0] for t in found] for n, found in times.items()}}
    clocks["processor"] = {n: [t[1] for t in found] for n, found in times.items()}
    return {f"{clock}_clock": summary(found) for clock, found in clocks.items()}


def timed(step: Step, index: int) -> tuple[float, float]:
    """Wall-clock seconds, and CPU seconds of this process. Other programs do not add to the latter."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    step(index)
    return time.perf_counter() - start, time.process_time() - used


def summary(times: dict[str, list[float]]) -> dict:
    """The mean of the fastest third of each loop, and their ratios. The control is the ratio of the two equal loops."""
    seconds = {name: undisturbed(t) for name, t in times.items()}
    hand = statistics.mean([seconds["hand"], seconds["hand_again"]])
    return {
        "seconds": seconds,
        "ratio": seconds["fullshard"] / hand,
        "control_hand_against_hand": seconds["hand_again"] / seconds["hand"],
    }


def main() -> None:
    args = arguments()
    if not inside_ranks():
        start_ranks(args.ranks, ["-m", "benchmarks.loop_overhead", *sys.argv[1:]])
    on_torch.start("cpu")
    with tempfile.TemporaryDirectory() as own:
        where = [own]
        dist.broadcast_object_list(where)
        result = measure(args, Path(where[0]))
        dist.barrier()
        if dist.get_rank() == 0:
            print(json.dumps({"case": vars(args), **about(), **result}, indent=1), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
