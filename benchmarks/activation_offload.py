"""Compare activations on the device with activations in host memory: peak memory and tokens/s. One process, one GPU.

    python -m benchmarks.activation_offload --preset gpt2-xl --batch 288 --sequence 1024 --remat full
    python -m benchmarks.activation_offload --preset llama-nano --batch 2 --sequence 64 --compute fp32 --device cpu  # a trial

Steps of the two kinds alternate on one model and optimizer. Prints a JSON line for each kind, and one that compares them.
"""

import argparse
import json
import math
import statistics
import time
from datetime import date

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.model.built_in import build

LOSSES = {"chunked": on_torch.chunked_loss, "summed": on_torch.summed_loss}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1.5b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=32768)
    parser.add_argument("--remat", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--share", type=float, default=1.0, help="share of the blocks that are offloaded, spread evenly")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compute", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--loss", default="chunked", choices=list(LOSSES))
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=4)
    return parser.parse_args()


def spread(plan: fs.Plan, share: float) -> fs.Plan:
    """The plan with activations in host memory for `share` of the blocks, spread evenly."""
    blocks = [u.name for u in plan.units if u.name.rpartition(".")[2].isdigit()]
    for i, name in enumerate(blocks):
        if math.ceil((i + 1) * share - 1e-9) > math.ceil(i * share - 1e-9):
            plan = plan.change(name, home=fs.Home(activations="host"))
    return plan


def start(args: argparse.Namespace) -> on_torch.State:
    with torch.device("meta"):
        model = build(args.preset)
    plan = fs.zero3(
        on_torch.describe(model),
        devices=1,
        precision=fs.Precision(compute=args.compute),
        batch=fs.Batch(args.batch, args.sequence),
        remat=args.remat,
        compile=args.compile,
    )
    return on_torch.shard(model, spread(plan, args.share), fs.AdamW(lr=1e-4), device=args.device, first_step_checks=False)


def timed(state: on_torch.State, batch: dict[str, torch.Tensor], args: argparse.Namespace) -> dict[str, float]:
    """The seconds, peak bytes and copied bytes of one step."""
    cuda, spill = state.device.type == "cuda", state.activations
    assert spill is not None
    before = (spill.spilled, spill.fetched)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    loss = on_torch.train_step(state, [batch], loss=LOSSES[args.loss], clip=1.0).loss
    if cuda:
        torch.cuda.synchronize()
    return {
        "seconds": time.perf_counter() - begun,
        "peak": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved": torch.cuda.max_memory_reserved() if cuda else 0,
        "spilled": spill.spilled - before[0],
        "fetched": spill.fetched - before[1],
        "loss": float(loss),
    }


def measure(state: on_torch.State, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Alternate steps of both kinds. Each goes first in half of the pairs."""
    vocab = fs.presets.preset(args.preset).vocab
    ids = torch.randint(0, vocab, (args.batch, args.sequence + 1), generator=torch.Generator().manual_seed(0)).to(state.device)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    steps: dict[str, list[dict[str, float]]] = {"device": [], "host": []}
    assert state.activations is not None
    for i in range(args.warm + args.pairs):
        for kind in ("host", "device") if i % 2 else ("device", "host"):
            state.activations.on = kind == "host"
            step = timed(state, batch, args)
            if i >= args.warm:
                steps[kind].append(step)
    return steps


def summary(steps: list[dict[str, float]], args: argparse.Namespace) -> dict[str, float]:
    return {
        "tokens_per_second": args.batch * args.sequence / statistics.median(s["seconds"] for s in steps),
        "seconds": statistics.median(s["seconds"] for s in steps),
        "fastest": min(s["seconds"] for s in steps),
        "slowest": max(s["seconds"] for s in steps),
        "peak_gib": max(s["peak"] for s in steps) / 2**30,
        "reserved_gib": max(s["reserved"] for s in steps) / 2**30,
        "spilled_gib": steps[-1]["spilled"] / 2**30,
        "fetched_gib": steps[-1]["fetched"] / 2**30,
        "loss": steps[-1]["loss"],
    }


def main() -> None:
    args = arguments()
    state = start(args)
    cuda = state.device.type == "cuda"
    about = {
        "case": vars(args),
        "hardware": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "fullshard": fs.__version__,
        "date": str(date.today()),
    }
    found = {kind: summary(steps, args) for kind, steps in measure(state, args).items()}
    for kind, row in found.items():
        print(json.dumps({"activations": kind, **about, **row}), flush=True)
    device, host = found["device"], found["host"]
    assert state.activations is not None
    compared = {
        "tokens_per_second": host["tokens_per_second"] / device["tokens_per_second"],
        "peak": host["peak_gib"] / device["peak_gib"] if cuda else None,
        "host_gib_held": state.activations.pool.nbytes / 2**30,
    }
    print(json.dumps({"activations": "host / device", "case": vars(args), **compared}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
