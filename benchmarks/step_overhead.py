"""Compare a step through fullshard with one of the same model under bare `fully_shard`, in one process group.

    python benchmarks/step_overhead.py                      # 2 gloo ranks, CPU
    python benchmarks/step_overhead.py --ranks 1 --preset llama-1.5b --batch 4 --sequence 4096 --compute bf16  # one GPU

Both steps run forward, cross-entropy, backward and fused AdamW. fullshard's step also counts the tokens of all ranks,
normalises by them, and reports the global loss and gradient norm. Steps of both alternate.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import date

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fullshard as fs
from fullshard import on_torch
from fullshard.launch.local import inside_ranks, start_ranks
from fullshard.on_torch.model.built_in import build


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-bytes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--compute", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--only", choices=["bare", "fullshard"], help="run one side alone, to compare with another program")
    return parser.parse_args()


def bare_model(args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The model under bare `fully_shard`, block by block as in torch's documentation."""
    with torch.device("meta"):
        model = build(args.preset)
    if args.compile:
        for layer in model.model.layers:
            layer.compile()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.compute == "bf16" else MixedPrecisionPolicy()
    options = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": policy,
        "reshard_after_forward": True,
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model.model.embed_tokens, **options)
    fully_shard([model.model.norm, model.lm_head], **options)
    fully_shard(model, **options)
    model.to_empty(device=device)
    model.apply(model._init_weights)
    return model


def bare(args: argparse.Namespace, device: torch.device):
    """A hand-written step of the model under bare `fully_shard`."""
    model = bare_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ours(args: argparse.Namespace, device: torch.device):
    """A step of the same model through fullshard."""
    with torch.device("meta"):
        model = build(args.preset)
    plan = fs.zero3(
        on_torch.describe(model),
        devices=dist.get_world_size(),
        precision=fs.Precision(compute=args.compute),
        batch=fs.Batch(args.batch, args.sequence),
        compile=args.compile,
    )
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-4), device=device.type)
    return lambda batch: on_torch.train_step(state, [batch]).loss


def measure(args: argparse.Namespace) -> dict:
    device = on_torch.start()
    vocab = fs.presets.preset(args.preset).vocab
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, vocab, (args.batch, args.sequence + 1), generator=generator).to(device)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    makers = {"bare": bare, "fullshard": ours}
    sides = {name: make(args, device) for name, make in makers.items() if args.only in (None, name)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, int] = {}
    for i in range(args.warm + args.pairs):
        order = list(sides) if i % 2 == 0 else list(sides)[::-1]  # neither side always goes first
        for name in order:
            seconds, peak = timed(sides[name], batch, device)
            if i >= args.warm:
                times[name].append(seconds)
                peaks[name] = peak
    tokens = args.batch * args.sequence
    seconds = {name: undisturbed(t) for name, t in times.items()}
    result: dict = {
        "seconds": seconds,
        "tokens_per_second_per_rank": {name: tokens / t for name, t in seconds.items()},
        "peak_gib": {name: p / 2**30 for name, p in peaks.items()} if device.type == "cuda" else None,
    }
    if not args.only:
        pairs = [a / b for a, b in zip(times["fullshard"], times["bare"], strict=True)]
        result |= {"ratio": seconds["fullshard"] / seconds["bare"], "median_of_pair_ratios": statistics.median(pairs)}
    return result


def undisturbed(times: list[float]) -> float:
    """The mean of the fastest third. Other programs only make steps slower, and by more than the difference to measure: on a
    busy machine the medians of two equal sides differ by 9%."""
    fastest = sorted(times)[: max(1, len(times) // 3)]
    return statistics.mean(fastest)


def timed(step, batch: dict[str, torch.Tensor], device: torch.device) -> tuple[float, int]:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    start = time.perf_counter()
    step(batch)
    synchronize()
    seconds = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def about() -> dict[str, str]:
    """The hardware, versions and date of a result."""
    cores = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else cores
    return {"hardware": hardware, "torch": torch.__version__, "fullshard": fs.__version__, "date": str(date.today())}


def main() -> None:
    args = arguments()
    if not inside_ranks() and args.ranks > 1:
        start_ranks(args.ranks, [__file__, *sys.argv[1:]])
    result = measure(args)
    if dist.get_rank() == 0:
        print(json.dumps({"case": vars(args), **about(), **result}, indent=1), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
