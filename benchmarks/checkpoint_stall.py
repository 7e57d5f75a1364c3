"""What a save costs the training: step time lost to it, and the rate at which it is written.

    python benchmarks/checkpoint_stall.py                                       # 2 gloo ranks, CPU, the demo's size
    python benchmarks/checkpoint_stall.py --ranks 1 --preset llama-3.6b --batch 4 --sequence 2048 --compute bf16 \\
        --shelf /disk/checkpoints --rounds 3                                    # one GPU

Three ways to save the same state take turns in one process group: fullshard's, `dcp.async_save` and `dcp.save`, each
to the same disk, and no save at all as a fourth. The save and the steps after it, until it is durable, are timed as one
window; what it took beyond as many steps of the windows without a save is lost. Of all numbers the lower quartile is
told: other work on the machine only ever adds. The raw rate is that of O_DIRECT writes of as many bytes.
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
from fullshard.direct import aligned, write_exactly
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
    parser.add_argument("--rounds", type=int, default=16, help="saves of each kind")
    parser.add_argument("--steady", type=int, default=2, help="steps between the end of one window and the next")
    parser.add_argument("--after", type=int, default=4, help="steps timed after each save, at least")
    parser.add_argument("--only", nargs="+", choices=["fullshard", "dcp.async_save", "dcp.save"])
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
    """Seconds of a save with the steps after it, how many these were, and until the save was durable."""
    for _ in range(bench.args.steady):
        bench.step()
    dist.barrier()
    start = time.perf_counter()
    done = bench.save(kind)
    blocked = time.perf_counter() - start
    window, steps, finished = blocked, 0, 0.0
    while steps < bench.args.after or not finished:
        window += bench.step()
        steps += 1
        if not finished and bench.all_done(done()):
            finished = time.perf_counter() - start
    return {"window": window, "steps": steps, "blocked": blocked, "durable": finished}


def quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


def raw_rate(args: argparse.Namespace, nbytes: int) -> float:
    """Bytes a second that O_DIRECT writes reach on this disk, all ranks at once, fsync included."""
    length = min(max(nbytes, 256 << 20), 8 << 30) // direct.PIECE * direct.PIECE
    memory = aligned(direct.PIECE)
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
        list(pool.map(lambda at: write_exactly(file, memory, at), range(0, length, direct.PIECE)))
    os.fsync(file)
    dist.barrier()
    seconds = time.perf_counter() - start
    os.close(file)
    path.unlink()
    return length / seconds


def measure(args: argparse.Namespace) -> dict:
    bench = Bench(args)
    kinds = ["nothing", *(args.only or ["fullshard", "dcp.async_save", "dcp.save"])]
    for kind in kinds:  # the first of each makes its arena or its plan
        one_round(bench, kind)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    raw = []
    for i in range(args.rounds):
        for kind in kinds if i % 2 == 0 else kinds[::-1]:
            found[kind].append(one_round(bench, kind))
        raw.append(raw_rate(args, bench.written))
    bench.writer.close()
    step = quartile([r["window"] / r["steps"] for r in found["nothing"]])
    result: dict = {"step_seconds": step}
    for kind in kinds[1:]:
        lost = quartile([r["window"] - r["steps"] * step for r in found[kind]])
        told = {key: quartile([r[key] for r in found[kind]]) for key in ("blocked", "durable")}
        result[kind] = {"lost_seconds": lost, "lost_of_a_step": lost / step, **told}
    rate = {"bytes_a_rank": bench.written, "raw_o_direct_bytes_per_second": statistics.median(raw)}
    if "fullshard" in kinds and statistics.median(raw):
        rate |= alone(bench)
        rate["write_of_raw"] = rate["write_bytes_per_second"] / statistics.median(raw)
    return {"saves": result, "rate": rate}


def alone(bench: Bench) -> dict[str, float]:
    """Bytes a second of a save while nothing trains: of all of it, and of what comes after staging."""
    writer = on_torch.Checkpointer(bench.args.shelf / "alone", bench.state)
    whole, writing = [], []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        saving = writer.save()
        staged = time.perf_counter()
        saving.result()
        end = time.perf_counter()
        whole.append(bench.written / (end - start))
        writing.append(bench.written / (end - staged))
    writer.close()
    return {"save_bytes_per_second": statistics.median(whole[1:]), "write_bytes_per_second": statistics.median(writing[1:])}


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
