"""Where the memory goes: train one model under several plans, and print bytes, peak memory and step time of each.

    torchrun --nproc-per-node=2 examples/memory_efficient.py
    torchrun --nproc-per-node=8 examples/memory_efficient.py --dim 2048 --layers 16 --vocab 32768 --sequence 2048    # GPUs

All plans start from the same weights and see the same tokens, so every fp32 plan must end at the same loss. zero1 and
zero2 hold the same bytes between steps; they differ while micro-batches accumulate. The chunked loss makes chunks of up
to 2 GiB. At the default size this is one chunk, so it saves only the extra copies of the logits that the plain loss keeps.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's log lines

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.base.text import table
from fullshard.model.presets import LlamaSize
from fullshard.on_torch.model.built_in import Llama

BF16 = fs.Precision(compute="bf16")
ROWS = 4  # rows per rank and step, under every plan
# name, strategy, rows per micro-batch, other choices of the plan, loss
PLANS = [
    ("ddp", fs.ddp, 2, {}, on_torch.summed_loss),
    ("zero1", fs.zero1, 2, {}, on_torch.summed_loss),
    ("zero2", fs.zero2, 2, {}, on_torch.summed_loss),
    ("zero3", fs.zero3, 2, {}, on_torch.summed_loss),
    ("zero3, smaller micro-batches", fs.zero3, 1, {}, on_torch.summed_loss),
    ("zero3, bf16", fs.zero3, 2, {"precision": BF16}, on_torch.summed_loss),
    ("zero3, remat", fs.zero3, 2, {"remat": "full"}, on_torch.summed_loss),
    ("zero3, chunked loss", fs.zero3, 2, {}, on_torch.chunked_loss),
    ("all of these", fs.zero3, 1, {"remat": "full", "precision": BF16}, on_torch.chunked_loss),
]


def main() -> None:
    args = arguments()
    device = on_torch.start()
    size = LlamaSize(args.dim, args.layers, args.dim // 32, args.dim // 32, 4 * args.dim, args.vocab, args.sequence)
    rows, first_seconds = [], None
    for name, strategy, micro_batch, choices, loss in PLANS:
        with torch.device("meta"):
            model = Llama(size)
        batch = fs.Batch(micro_batch, args.sequence, accumulate=ROWS // micro_batch)
        plan = strategy(on_torch.describe(model), devices=dist.get_world_size(), batch=batch, **choices)
        state = on_torch.shard(model, plan, optimizer=fs.AdamW(lr=1e-3), seed=0)
        held, peak, seconds, value = measure(state, args, loss)
        first_seconds = first_seconds or seconds
        kinds = [mib(held[kind]) for kind in ("params", "gradients", "optimizer")]
        shape = f"{batch.accumulate} × {micro_batch}"
        rows.append([name, shape, *kinds, mib(peak), f"{seconds / first_seconds:.2f}", f"{value:.6f}"])
        del model, state
        gc.collect()  # reference cycles of modules and hooks would count in the next plan's peak
    if on_torch.is_first():
        head = ["plan", "rows", "params", "gradients", "optimizer", "peak", "time", "loss"]
        print(f"ranks: {dist.get_world_size()}, {device.type}; sizes of rank 0 in MiB; time relative to ddp")
        print("rows: micro-batches per step × rows in each\n")
        print(table(head, rows, right=(2, 3, 4, 5, 6, 7)))
        print("\nparams, gradients, optimizer: what the rank holds when the optimizer steps, counted from the tensors.")
        counted = "CUDA's allocator" if device.type == "cuda" else "torch's CPU allocator, read from a profile of one step"
        print(f"peak: the most bytes held at any time in a step, counted by {counted}.", flush=True)
    on_torch.finish()


def measure(state: on_torch.State, args: argparse.Namespace, loss: on_torch.loss.LossFunction) -> tuple[dict, int, float, float]:
    """Returns the bytes by kind when the optimizer steps, the peak bytes of a step, the seconds per step, the last loss."""
    held: dict[str, int] = {}
    state.optimizer.register_step_pre_hook(lambda *_: held.update(state.held_bytes()))
    generator = torch.Generator().manual_seed(1 + on_torch.data_rank(state.plan.mesh))
    ids_BT = torch.randint(0, args.vocab, (ROWS, args.sequence + 1), generator=generator)
    batches = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]} for ids in ids_BT.split(state.plan.batch.micro_batch)]

    def step() -> float:  # the loss
        return on_torch.train_step(state, batches, loss=loss).loss.item()

    step()  # the first step also runs checks and creates the optimizer state
    peak = min(peak_bytes(state, step) for _ in range(2))  # unseen frees can only make it too large
    times = []
    for _ in range(args.steps - 3):
        start = time.perf_counter()
        value = step()
        times.append(time.perf_counter() - start)
    return held, peak, statistics.median(times), value


def peak_bytes(state: on_torch.State, step) -> int:
    """The most bytes alive at once in a step, including the state."""
    if state.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as directory:  # the trace has a record of every allocation
        profile.export_chrome_trace(f"{directory}/trace.json")
        trace = json.loads(Path(f"{directory}/trace.json").read_text())["traceEvents"]
    alive: dict[int, int] = {}  # by address; frees by gloo's threads are not recorded, until the address is used again
    top = 0
    for record in sorted((e["args"] | {"ts": e["ts"]} for e in trace if e["name"] == "[memory]"), key=lambda r: r["ts"]):
        if record["Bytes"] > 0:
            alive[record["Addr"]] = record["Bytes"]
        else:
            alive.pop(record["Addr"], None)
        top = max(top, sum(alive.values()))
    return sum(state.held_bytes().values()) + top


def mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=64, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5, help="steps under each plan, at least 4")
    args = parser.parse_args()
    if args.steps < 4:
        parser.error("--steps must be at least 4: one to warm up, two for the peak, the others for the time")
    return args


if __name__ == "__main__":
    main()
