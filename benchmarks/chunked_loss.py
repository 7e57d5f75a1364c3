"""Compare the chunked cross-entropy with the plain one: the loss alone, and a full training step. One GPU.

    python benchmarks/chunked_loss.py

Times are medians of interleaved runs. Memory is the peak beyond what was allocated before the run.
"""

import argparse
import json
import statistics
import time
from datetime import date

import torch
import torch.nn.functional as F

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.model.built_in import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a GPU; the exactness tests run on a CPU (tests/cpu/test_chunked_loss.py)")
    about = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today()), "case": vars(args)}
    print(json.dumps({**about, "loss_alone": alone(args), "step": whole_step(args)}, indent=1))


def alone(args: argparse.Namespace) -> dict:
    """Forward and backward of head and loss."""
    hidden = torch.randn(args.tokens, args.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(args.vocab, args.dim, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, args.vocab, (args.tokens,), device="cuda")

    def plain() -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")

    sides = {"plain": plain}
    for gib in (0.5, 1, 2, 4):
        sides[f"chunked_{gib}GiB"] = lambda gib=gib: on_torch.chunked_cross_entropy(
            hidden, weight, labels, budget=int(gib * 2**30)
        )

    def run(name: str) -> None:
        (sides[name]() / args.tokens).backward()
        hidden.grad = weight.grad = None

    return interleaved({name: lambda name=name: run(name) for name in sides}, args.rounds)


def whole_step(args: argparse.Namespace) -> dict:
    """Llama 1.5B, 4 × 4096, with full remat. The plain loss is then the peak of the step."""
    on_torch.start()
    with torch.device("meta"):
        model = build("llama-1.5b")
    plan = fs.zero3(
        on_torch.describe(model), devices=1, precision=fs.Precision(compute="bf16"), batch=fs.Batch(4, 4096), remat="full"
    )
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-4))
    ids = torch.randint(0, args.vocab, (4, 4097), device="cuda")
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    sides = {"plain": on_torch.summed_loss, "chunked": on_torch.chunked_loss}
    return interleaved(
        {name: lambda loss=loss: on_torch.train_step(state, [batch], loss=loss) for name, loss in sides.items()}, args.rounds
    )


def interleaved(sides: dict, rounds: int) -> dict:
    """The seconds, their ratio to the first side, and the peak memory of each side."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    peaks: dict[str, float] = {}
    for i in range(rounds + 2):
        for name, run in sides.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if i >= 2:
                times[name].append(time.perf_counter() - start)
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    first = next(iter(sides))
    median = {name: statistics.median(t) for name, t in times.items()}
    return {
        n: {"seconds": round(median[n], 5), "ratio": round(median[n] / median[first], 4), "peak_gib": round(peaks[n], 3)}
        for n in sides
    }


if __name__ == "__main__":
    main()
