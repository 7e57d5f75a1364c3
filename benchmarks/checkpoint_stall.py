"""What a save costs the training: step time lost to it, and the rate at which it is written.

    python benchmarks/checkpoint_stall.py                                       # 2 gloo ranks, CPU, the demo's size
    python benchmarks/checkpoint_stall.py --ranks 1 --preset llama-3.6b --batch 4 --sequence 2048 --compute bf16 \\
        --shelf /disk/checkpoints --rounds 3                                    # one GPU

Three ways to save the same state take turns in one process group: fullshard's, `dcp.async_save` and `dcp.save`, each
to the same disk. After each save the next steps are timed until they are as fast as before it, and until the save is
done; what they took beyond the steady step is lost. The raw rate is that of O_DIRECT writes of as many bytes.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import fullshard as fs
import fullshard.presets
from fullshard import on_torch
from fullshard.checkpoint import direct
from fullshard.launch.local import inside_ranks, torchrun

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-bytes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--compute", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--shelf", type=Path, default=Path("runs/benchmark-checkpoints"))
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind")
    parser.add_argument("--steady", type=int, default=12, help="steps before each save that say what a step takes")
    parser.add_argument("--after", type=int, default=12, help="steps timed after each save, at least")
    parser.add_argument("--only", nargs="+", choices=["fullshard", "dcp.async_save", "dcp.save", "nothing"])
    return parser.parse_args()


class Bench:
    """A state that trains, and the ways to save it."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, on_torch.start()
        model = on_torch.load_model(args.preset)
        plan = fs.zero3(
            on_torch.describe(model),
            devices=dist.get_world_size(),
            precision=fs.Precision(compute=args.compute),
            batch=fs.Batch(args.batch, args.sequence),
            remat="full" if args.compute == "bf16" else "none",
        )
        self.state = on_torch.shard(model, plan, fs.AdamW(lr=1e-4), device=self.device.type)
        vocab = fs.presets.preset(args.preset).vocab
        draw = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(0, vocab, (args.batch, args.sequence + 1), generator=draw).to(self.device)
        self.batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        self.step(), self.step()
        self.writer = on_torch.Checkpointer(args.shelf / "ours", self.state, overlap=True)
        self.group = dist.new_group(backend="gloo")
        self.written = sum(self.state.held_bytes()[k] for k in ("params", "optimizer"))

    def step(self) -> float:
        start = time.perf_counter()
        on_torch.train_step(self.state, [self.batch], loss=on_torch.chunked_loss, clip=1.0).numbers()
        return time.perf_counter() - start

    def save(self, kind: str) -> Callable[[], bool]:
        """Start one; whether it is done, as far as this rank knows."""
        if kind == "nothing":
            return lambda: True
        if kind == "fullshard":
            return self.writer.save().done
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer, options=FLAT)
        where = str(self.args.shelf / kind)
        if kind == "dcp.save":
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=where)
            return lambda: True
        return dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=where, process_group=self.group).done

    def all_done(self, done: bool) -> bool:
        total = torch.tensor(int(done))
        dist.all_reduce(total, group=self.group)
        return int(total) == dist.get_world_size()


def one_round(bench: Bench, kind: str) -> dict[str, float]:
    """Seconds of a steady step, seconds lost to one save, and until it was durable."""
    steady = statistics.median([bench.step() for _ in range(bench.args.steady)])
    dist.barrier()
    start = time.perf_counter()
    done = bench.save(kind)
    blocked = time.perf_counter() - start
    lost, steps, finished = blocked, 0, None
    while steps < bench.args.after or finished is None:
        lost += bench.step() - steady
        steps += 1
        if finished is None and bench.all_done(done()):
            finished = time.perf_counter() - start
    return {"step": steady, "blocked": blocked, "lost": lost, "durable": finished}


def raw_rate(args: argparse.Namespace, nbytes: int) -> float:
    """Bytes a second that O_DIRECT writes reach on this disk, all ranks at once, fsync included."""
    length = min(nbytes, 8 << 30) // direct.PIECE * direct.PIECE
    if not length:
        return 0.0
    memory = direct.aligned(direct.PIECE)
    memory[:] = os.urandom(1 << 16) * (direct.PIECE >> 16)
    path = args.shelf / f"raw-{dist.get_rank()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    start = time.perf_counter()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    except OSError:
        return 0.0
    with ThreadPoolExecutor(direct.IN_FLIGHT) as pool:
        list(pool.map(lambda at: direct.write_exactly(file, memory, at), range(0, length, direct.PIECE)))
    os.fsync(file)
    dist.barrier()
    seconds = time.perf_counter() - start
    os.close(file)
    path.unlink()
    return length / seconds


def measure(args: argparse.Namespace) -> dict:
    bench = Bench(args)
    kinds = args.only or ["nothing", "fullshard", "dcp.async_save", "dcp.save"]
    for kind in kinds:  # the first of each makes its arena or its plan
        one_round(bench, kind)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    raw = []
    for i in range(args.rounds):
        for kind in kinds if i % 2 == 0 else kinds[::-1]:
            found[kind].append(one_round(bench, kind))
        raw.append(raw_rate(args, bench.written))
    bench.writer.close()
    middle = lambda kind, key: statistics.median([r[key] for r in found[kind]])
    result = {
        kind: {
            "step_seconds": middle(kind, "step"),
            "blocked_seconds": middle(kind, "blocked"),
            "lost_seconds": middle(kind, "lost"),
            "lost_of_a_step": statistics.median([r["lost"] / r["step"] for r in found[kind]]),
            "durable_seconds": middle(kind, "durable"),
        }
        for kind in kinds
    }
    rate = {"bytes_a_rank": bench.written, "raw_o_direct_bytes_per_second": statistics.median(raw)}
    if "fullshard" in kinds and statistics.median(raw):
        rate["alone_bytes_per_second"] = alone(bench)
        rate["of_raw"] = rate["alone_bytes_per_second"] / statistics.median(raw)
    return {"saves": result, "rate": rate}


def alone(bench: Bench) -> float:
    """The rate of a save while nothing trains: staged, hashed, written, synced and committed."""
    writer = on_torch.Checkpointer(bench.args.shelf / "alone", bench.state)
    rates = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        writer.save().result()
        rates.append(bench.written / (time.perf_counter() - start))
    writer.close()
    return statistics.median(rates[1:])


def main() -> None:
    args = arguments()
    if args.ranks > 1 and not inside_ranks():
        torchrun(args.ranks, [__file__, *sys.argv[1:]])
    found = measure(args)
    if on_torch.is_first():
        about = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
        }
        if torch.cuda.is_available():
            about["device"] = torch.cuda.get_device_name()
        print(json.dumps({**about, "arguments": {k: str(v) for k, v in vars(args).items()}, **found}, indent=1))
        shutil.rmtree(args.shelf, ignore_errors=True)
    on_torch.finish()


if __name__ == "__main__":
    main()
