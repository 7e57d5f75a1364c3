"""What a save costs the training: step time lost to it, and the rate at which it is written.

    python benchmarks/checkpoint_stall.py                                       # 2 gloo ranks, CPU, the demo's size
    python benchmarks/checkpoint_stall.py --ranks 1 --preset llama-3.6b --batch 4 --sequence 2048 --compute bf16 \\
        --shelf /disk/checkpoints --rounds 1 --warm stage --alone 1 --beside 20 # one GPU

Three ways to save the same state take turns in one process group: fullshard's, `dcp.async_save` and `dcp.save`, each
to the same disk, which needs room for one checkpoint: each is removed before the next. A save and the steps after
it, until it is durable, are timed as one window; what it took beyond as many steps of the windows without a save
around it is lost: steps of a shared machine drift. Of all saves the mean of the middle half is told, with its
standard error over resampled ones. Beside it, what a
save takes of the cores: the processor's time of its call and of the threads that came with `Checkpointer`, which is what
training would lose if it never left a core idle, and which other work on the machine disturbs less. The raw rate is
that of O_DIRECT writes. Every window is told as soon as it is over, one JSON object a line; the last object sums up.
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
from fullshard.checkpoint import file_writer
from fullshard.direct_io import aligned, write_exactly
from fullshard.launch.local import inside_ranks, torchrun
from fullshard.model.presets import LlamaSize, preset
from fullshard.on_torch.models import GPT, Llama

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
KINDS = ["fullshard", "dcp.async_save", "dcp.save"]
RESAMPLED = 100
Windows = list[dict[str, float]]
RAW = 1 << 30  # bytes of memory that raw writes come from
SPARE = 1 << 30  # bytes of the disk that are left alone


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-bytes")
    parser.add_argument("--layers", type=int, help="as many layers instead of the preset's: a smaller state")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--compute", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--shelf", type=Path, default=Path("runs"), help="`stall` in it is made, and removed at the end")
    parser.add_argument("--rounds", type=int, default=16, help="saves of each kind")
    parser.add_argument("--steady", type=int, default=2, help="steps between the end of one window and the next")
    parser.add_argument("--after", type=int, default=4, help="steps timed after each save, at least")
    parser.add_argument("--beside", type=int, default=1 << 20, help="steps timed without a save after each, at most")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--warm", default="save", choices=["save", "stage"], help="before the first round: one save of each kind,"
                        " or fullshard's arena alone")  # fmt: skip
    parser.add_argument("--alone", type=int, default=4, help="saves while nothing trains, for the rate; 0: none")
    found = parser.parse_args()
    found.shelf /= "stall"
    return found


def tell(**found: Any) -> None:
    """At once: what is known is not lost when a later part fails."""
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)


class Saved:
    """A save that was over when it returned, or none at all."""

    def done(self) -> bool:
        return True

    def result(self) -> None:
        return None


class Bench:
    """A state that trains, and the ways to save it."""

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
        draw = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(0, size.vocab, (args.batch, args.sequence + 1), generator=draw).to(self.device)
        self.batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        self.step(), self.step()
        self.training = set(thread_seconds())
        self.written = sum(self.state.held_bytes()[k] for k in ("params", "optimizer"))
        self.refuse_small()
        self.writer = on_torch.Checkpointer(args.shelf / "fullshard", self.state, overlap=True)
        self.group = dist.new_group(backend="gloo")

    def refuse_small(self) -> None:
        shelf = self.args.shelf
        shelf.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(shelf).free, self.written * dist.get_world_size() + SPARE
        tell(bytes_a_rank=self.written, disk_free=free, host_free=host_free())
        if free < needed:
            raise fs.FullshardError(f"{shelf} has {free} bytes free, a save needs {needed}; give a smaller --layers")

    def step(self) -> float:
        start = time.perf_counter()
        on_torch.train_step(self.state, [self.batch], loss=on_torch.chunked_loss, clip=1.0).numbers()
        return time.perf_counter() - start

    def save(self, kind: str) -> Any:
        """Start one; what has `done`, as far as this rank knows, and `result`, which raises what went wrong."""
        if kind == "nothing":
            return Saved()
        if kind == "fullshard":
            return self.writer.save()
        model, optimizer = get_state_dict(self.state.model, self.state.optimizer, options=FLAT)
        where, both = str(self.args.shelf / kind), {"model": model, "optimizer": optimizer}
        if kind == "dcp.save":
            dcp.save(both, checkpoint_id=where)
            return Saved()
        return dcp.async_save(both, checkpoint_id=where, process_group=self.group)

    def beside(self) -> float:
        """Processor's time of this process's threads that did not come with the training."""
        return sum(used for thread, used in thread_seconds().items() if thread not in self.training)

    def all_done(self, done: bool) -> bool:
        total = torch.tensor(int(done))
        dist.all_reduce(total, group=self.group)
        return int(total) == dist.get_world_size()

    def remove(self, kind: str) -> None:
        """A checkpoint is as large as half a disk: one at a time. Its blocks are free before the next is timed."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.args.shelf / kind, ignore_errors=True)
            os.sync()
        dist.barrier()

    def warm(self) -> None:
        """What the first save of each kind makes, for all that come: an arena, a plan."""
        if self.args.warm == "save":
            for kind in ("nothing", *self.args.only):
                one_round(self, kind, self.args.after)
        elif "fullshard" in self.args.only:
            with torch.no_grad(), self.state.values() as values:
                self.writer.staging.start(values).finish()
        synchronize()


def thread_seconds() -> dict[str, float]:
    """Processor's time of each thread of this process."""
    return {t.name: int((t / "schedstat").read_text().split()[0]) / 1e9 for t in Path("/proc/self/task").iterdir()}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_free() -> int:
    """Bytes of memory that this machine can still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def one_round(bench: Bench, kind: str, after: int) -> dict[str, float]:
    """Seconds of a save with the steps after it, how many these were, and until the save was durable."""
    for _ in range(bench.args.steady):
        bench.step()
    dist.barrier()
    start, used = time.perf_counter(), time.thread_time() + bench.beside()
    saving = bench.save(kind)
    blocked, called = time.perf_counter() - start, time.thread_time()
    window, steps, finished = blocked, 0, 0.0
    while steps < after or not finished:
        window += bench.step()
        steps += 1
        if not finished and bench.all_done(saving.done()):
            finished = time.perf_counter() - start
    saving.result()
    used = called + bench.beside() - used
    bench.remove(kind)
    return {"window": window, "cores": used, "steps": steps, "blocked": blocked, "durable": finished}


def middle(values: list[float]) -> float:
    """The mean of the middle half."""
    cut = len(values) // 4
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def raw_rate(args: argparse.Namespace, nbytes: int) -> float:
    """Bytes a second that O_DIRECT writes reach on this disk, all ranks at once, fsync included."""
    room = (shutil.disk_usage(args.shelf).free - SPARE) // dist.get_world_size()
    length = min(max(nbytes, 256 << 20), room) // file_writer.PIECE * file_writer.PIECE  # as long as a save: disks tire
    memory = aligned(min(length, RAW))  # as a state would: not from the caches
    memory[:] = os.urandom(1 << 16) * (len(memory) >> 16)
    path = args.shelf / f"raw-{dist.get_rank()}"
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
    tell(warm=True, host_free=host_free(), device_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
    longest = args.after
    for i in range(args.rounds):
        for kind in args.only if i % 2 == 0 else args.only[::-1]:
            # Every other time the window without a save comes first: what follows on what must not matter.
            for each in (kind, "nothing") if i % 2 == 0 else ("nothing", kind):
                # As many steps without a save: over a long window a step's length must be known well.
                one = one_round(bench, each, args.after if each == kind else min(longest, args.beside))
                longest = max(longest, int(one["steps"])) if each == kind else longest
                found[each].append(one | {"turn": i})
                tell(kind=each, **one, **lost_of(found, kind))
    told = {kind: summary(found, kind) for kind in args.only}
    return {"saves": {"step_seconds": step_seconds(found["nothing"]), **told}, "rate": rates(bench)}


def step_seconds(windows: Windows) -> float:
    return middle([r["window"] / r["steps"] for r in windows])


def lost_of(found: dict[str, Windows], kind: str) -> dict[str, float]:
    """What saves of a kind have cost so far, in steps; unknown before there is a window without a save."""
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
    """Bytes a second of a save while nothing trains, of all of it and of what comes after staging, beside raw writes."""
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
        tell(raw=raw[-1], save=whole[-1], write=writing[-1])
    rate |= {"save_bytes_per_second": statistics.median(whole), "write_bytes_per_second": statistics.median(writing)}
    if statistics.median(raw):  # a disk that takes O_DIRECT
        rate["raw_o_direct_bytes_per_second"] = statistics.median(raw)
        rate["write_of_raw"] = rate["write_bytes_per_second"] / rate["raw_o_direct_bytes_per_second"]
    return rate


def guarded(args: argparse.Namespace, act: Callable[[Bench], dict]) -> dict:
    """What failed is told where the results are, and the disk is left as it was."""
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
            shutil.rmtree(args.shelf, ignore_errors=True)


def main() -> None:
    args = arguments()
    if args.ranks > 1 and not inside_ranks():
        torchrun(args.ranks, [__file__, *sys.argv[1:]])
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
