"""The cost of saving a checkpoint while training: the step time it takes, and the rate at which it is written.

    python benchmarks/checkpoint_stall.py                                       # 2 gloo ranks, CPU, the demo's size
    python benchmarks/checkpoint_stall.py --ranks 1 --preset llama-3.6b --batch 4 --sequence 2048 --compute bf16 \\
        --checkpoint-dir /disk/checkpoints --rounds 1 --warm stage --alone 1 --beside 20 # one GPU

Three ways to save the same state alternate in one process group: fullshard's, `dcp.async_save` and `dcp.save`. All write
to the same disk, which needs room for one checkpoint, since each is removed before the next.

A window is a save and the steps after it until it is durable. Its cost is its time minus that of as many steps in
neighbouring windows without a save, because step times drift on a shared machine. The result is the mean of the middle
half of all saves, with a bootstrapped standard error.

The CPU time of a save is that of its call and of the threads that `Checkpointer` started: what training would lose if it
used every core all the time. Other load disturbs it less than wall-clock time. The raw rate is that of O_DIRECT writes.
Prints one JSON line per window, and a summary at the end.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import fullshard as fs
from fullshard import on_torch
from fullshard.base.direct_io import aligned, write_exactly
from fullshard.checkpoint import file_writer
from fullshard.launch.local import inside_ranks, start_ranks
from fullshard.model.presets import LlamaSize, preset
from fullshard.on_torch.model.built_in import GPT, Llama

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
KINDS = ["fullshard", "dcp.async_save", "dcp.save"]
RESAMPLED = 100
Windows = list[dict[str, float]]
RAW = 1 << 30  # bytes of memory that raw writes come from
SPARE = 1 << 30  # bytes of the disk that are left alone


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-bytes")
    parser.add_argument("--layers", type=int, help="layers instead of the preset's, for a smaller state")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--compute", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument(
        "--checkpoint-dir", type=Path, default=Path("runs"), help="the directory `stall` is made in it, and removed at the end"
    )
    parser.add_argument("--rounds", type=int, default=16, help="saves of each kind")
    parser.add_argument("--steady", type=int, default=2, help="steps between the end of one window and the next")
    parser.add_argument("--after", type=int, default=4, help="steps timed after each save, at least")
    parser.add_argument("--beside", type=int, default=1 << 20, help="steps timed without a save after each, at most")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--warm", default="save", choices=["save", "stage"], help="before the first round: one save of each kind,"
                        " or fullshard's arena alone")  # fmt: skip
    parser.add_argument("--alone", type=int, default=4, help="saves while nothing trains, for the rate; 0: none")
    found = parser.parse_args()
    found.checkpoint_dir /= "stall"
    return found


def print_row(**found: Any) -> None:
    """Print a JSON line at once, so that it is not lost if a later part fails."""
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)


class Saved:
    """The handle of a save that is already done, or of no save."""

    def done(self) -> bool:
        return True

    def result(self) -> None:
        return None


class Bench:
    """A state to train, and the ways to save it."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, on_torch.start()
        size = preset(args.preset)
        size = dataclasses.replace(size, layers=args.layers or size.layers)
        with torch.device("meta"):
            model = Llama(size) if isinstance(size, LlamaSize) else GPT(size)
        plan = fs.zero3(
            on_torch.describe(model),
            devices=dist.get_world_size(),
            precision=fs.Precision(compute=args.compute),
            batch=fs.Batch(args.batch, args.sequence),
            remat="full" if args.compute == "bf16" else "none",
        )
        self.state = on_torch.shard(model, plan, fs.AdamW(lr=1e-4), device=self.device.type)
        generator = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(0, size.vocab, (args.batch, args.sequence + 1), generator=generator).to(self.device)
        self.batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        self.step(), self.step()
        self.training = set(thread_seconds())
        self.written = sum(self.state.held_bytes()[k] for k in ("params", "optimizer"))
        self.refuse_small()
        self.writer = on_torch.Checkpointer(args.checkpoint_dir / "fullshard", self.state, overlap=True)
        self.group = dist.new_group(backend="gloo")

    def refuse_small(self) -> None:
        checkpoint_dir = self.args.checkpoint_dir
        checkpoint_dir.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(checkpoint_dir).free, self.written * dist.get_world_size() + SPARE
        print_row(bytes_a_rank=self.written, disk_free=free, host_free=host_free())
        if free < needed:
            raise fs.FullshardError(f"{checkpoint_dir} has {free} bytes free, a save needs {needed}; give a smaller --layers")

    def step(self) -> float:
        start = time.perf_counter()
        on_torch.train_step(self.state, [self.batch], loss=on_torch.chunked_loss, clip=1.0).numbers()
        return time.perf_counter() - start

    def save(self, kind: str) -> Any:
        """Start a save. Returns a handle with `done`, for this rank, and `result`, which raises its error."""
        if kind == "nothing":
            return Saved()
        if kind == "fullshard":
            return self.writer.save()
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer, options=FLAT)
        where, both = str(self.args.checkpoint_dir / kind), {"model": model, "optimizer": optimizer}
        if kind == "dcp.save":
            dcp.save(both, checkpoint_id=where)
            return Saved()
        return dcp.async_save(both, checkpoint_id=where, process_group=self.group)

    def background_seconds(self) -> float:
        """The CPU time of the threads of this process that do not train."""
        return sum(used for thread, used in thread_seconds().items() if thread not in self.training)

    def all_done(self, done: bool) -> bool:
        total = torch.tensor(int(done))
        dist.all_reduce(total, group=self.group)
        return int(total) == dist.get_world_size()

    def remove(self, kind: str) -> None:
        """Remove a checkpoint, and wait until its blocks are free. The disk may have room for one only."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.args.checkpoint_dir / kind, ignore_errors=True)
            os.sync()
        dist.barrier()

    def warm(self) -> None:
        """Let each kind of save allocate what it keeps for later saves: memory and plans."""
        if self.args.warm == "save":
            for kind in ("nothing", *self.args.only):
                one_round(self, kind, self.args.after)
        elif "fullshard" in self.args.only:
            with torch.no_grad(), self.state.values() as values:
                self.writer.staging.start(values).finish()
        synchronize()


def thread_seconds() -> dict[str, float]:
    """The CPU time of each thread of this process."""
    return {t.name: int((t / "schedstat").read_text().split()[0]) / 1e9 for t in Path("/proc/self/task").iterdir()}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_free() -> int:
    """The available bytes of host memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def one_round(bench: Bench, kind: str, after: int) -> dict[str, float]:
    """Time one window: its seconds and steps, the CPU time of the save, the seconds its call took, and the seconds until it
    was durable."""
    for _ in range(bench.args.steady):
        bench.step()
    dist.barrier()
    start, used = time.perf_counter(), time.thread_time() + bench.background_seconds()
    saving = bench.save(kind)
    blocked, called = time.perf_counter() - start, time.thread_time()
    window, steps, finished = blocked, 0, 0.0
    while steps < after or not finished:
        window += bench.step()
        steps += 1
        if not finished and bench.all_done(saving.done()):
            finished = time.perf_counter() - start
    saving.result()
    used = called + bench.background_seconds() - used
    bench.remove(kind)
    return {"window": window, "cores": used, "steps": steps, "blocked": blocked, "durable": finished}


def middle(values: list[float]) -> float:
    """The mean of the middle half."""
    cut = len(values) // 4
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def raw_rate(args: argparse.Namespace, nbytes: int) -> float:
    """Bytes per second of O_DIRECT writes to this disk by all ranks at once, including fsync."""
    room = (shutil.disk_usage(args.checkpoint_dir).free - SPARE) // dist.get_world_size()
    length = (
        min(max(nbytes, 256 << 20), room) // file_writer.PIECE * file_writer.PIECE
    )  # as long as a save, since some disks slow down
    memory = aligned(min(length, RAW))  # larger than the CPU's caches, as a state is
    memory[:] = os.urandom(1 << 16) * (len(memory) >> 16)
    path = args.checkpoint_dir / f"raw-{dist.get_rank()}"
    dist.barrier()
    start = time.perf_counter()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    except OSError:
        return 0.0
    with ThreadPoolExecutor(file_writer.IN_FLIGHT) as pool:
        parts = [memory[at : at + file_writer.PIECE] for at in range(0, len(memory), file_writer.PIECE)]
        list(
            pool.map(
                lambda i: write_exactly(file, parts[i % len(parts)], i * file_writer.PIECE), range(length // file_writer.PIECE)
            )
        )
    os.fsync(file)
    dist.barrier()
    seconds = time.perf_counter() - start
    os.close(file)
    path.unlink()
    return length / seconds


def measure(bench: Bench) -> dict:
    args, found = bench.args, {kind: [] for kind in ("nothing", *bench.args.only)}
    bench.warm()
    print_row(
        warm=True, host_free=host_free(), device_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    )
    longest = args.after
    for i in range(args.rounds):
        for kind in args.only if i % 2 == 0 else args.only[::-1]:
            # In every other round the window without a save comes first, so that their order does not matter.
            for each in (kind, "nothing") if i % 2 == 0 else ("nothing", kind):
                # As many steps without a save: a long window needs a precise step time.
                one = one_round(bench, each, args.after if each == kind else min(longest, args.beside))
                longest = max(longest, int(one["steps"])) if each == kind else longest
                found[each].append(one | {"turn": i})
                print_row(kind=each, **one, **lost_of(found, kind))
    summaries = {kind: summary(found, kind) for kind in args.only}
    return {"saves": {"step_seconds": step_seconds(found["nothing"]), **summaries}, "rate": rates(bench)}


def step_seconds(windows: Windows) -> float:
    return middle([r["window"] / r["steps"] for r in windows])


def lost_of(found: dict[str, Windows], kind: str) -> dict[str, float]:
    """The cost of a kind of save so far, in steps. Empty until there is a window without a save."""
    saves, others = found[kind], found["nothing"]
    near = [[r["window"] / r["steps"] for r in others if abs(r["turn"] - save["turn"]) <= 1] for save in saves]
    lost = [r["window"] / statistics.mean(step) - r["steps"] for r, step in zip(saves, near, strict=True) if step]
    if not lost:
        return {}
    again = random.Random(0)
    tries = [middle(again.choices(lost, k=len(lost))) for _ in range(RESAMPLED)]
    cores = middle([r["cores"] for r in saves]) - middle([r["cores"] for r in others])
    return {
        "lost_of_a_step": middle(lost),
        "standard_error": statistics.pstdev(tries),
        "cores_of_a_step": cores / step_seconds(others),
    }


def summary(found: dict[str, Windows], kind: str) -> dict[str, float]:
    return lost_of(found, kind) | {key: middle([r[key] for r in found[kind]]) for key in ("blocked", "durable")}


def rates(bench: Bench) -> dict[str, float]:
    """Bytes per second of a save without training: of the full save, of the part after staging, and of raw writes."""
    rate: dict[str, float] = {"bytes_a_rank": bench.written}
    if "fullshard" not in bench.args.only or not bench.args.alone:
        return rate
    raw, whole, writing = [], [], []
    for _ in range(bench.args.alone):
        raw.append(raw_rate(bench.args, bench.written))
        dist.barrier()
        start = time.perf_counter()
        saving = bench.writer.save()
        saving.staged()
        staged = time.perf_counter()
        saving.result()
        end = time.perf_counter()
        whole.append(bench.written / (end - start))
        writing.append(bench.written / (end - staged))
        bench.remove("fullshard")
        print_row(raw=raw[-1], save=whole[-1], write=writing[-1])
    rate |= {"save_bytes_per_second": statistics.median(whole), "write_bytes_per_second": statistics.median(writing)}
    if statistics.median(raw):  # 0 if the disk does not support O_DIRECT
        rate["raw_o_direct_bytes_per_second"] = statistics.median(raw)
        rate["write_of_raw"] = rate["write_bytes_per_second"] / rate["raw_o_direct_bytes_per_second"]
    return rate


def guarded(args: argparse.Namespace, act: Callable[[Bench], dict]) -> dict:
    """Run the benchmark. Prints an error as a JSON line too, and removes all files."""
    try:
        bench = Bench(args)
        found = act(bench)
        bench.writer.close()
        return found
    except BaseException as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
        raise
    finally:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(args.checkpoint_dir, ignore_errors=True)


def main() -> None:
    args = arguments()
    if args.ranks > 1 and not inside_ranks():
        start_ranks(args.ranks, [__file__, *sys.argv[1:]])
    found = guarded(args, measure)
    if on_torch.is_first():
        about = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
        }
        if torch.cuda.is_available():
            about["device"] = torch.cuda.get_device_name()
        print(json.dumps({**about, "arguments": {k: str(v) for k, v in vars(args).items()}, **found}, indent=1), flush=True)
    on_torch.finish()


if __name__ == "__main__":
    main()
