"""The host time of single operators, and how many kernels each launches. `tracing.cuda_kernels.LAUNCHES` is from here.

python -m benchmarks.host_probe        # one GPU, takes seconds; prints one JSON line per operator
"""

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from fullshard.on_torch.measuring import timings

CALLS, ROUNDS = 50, 7
TOKENS, EXPERTS, WIDTH = 4096, 8, 2048


def calls() -> dict[str, Callable[[], object]]:
    """Operators as in Mixtral's expert layers, with 2,048 tokens that go to two experts each."""
    cuda = torch.device("cuda")
    x = torch.randn(TOKENS, WIDTH, device=cuda, dtype=torch.bfloat16)
    index = torch.randint(0, EXPERTS, (TOKENS,), device=cuda)
    order = torch.randperm(TOKENS, device=cuda)
    scores = torch.rand(TOKENS // 2, EXPERTS, device=cuda)
    weights = torch.randn(EXPERTS, WIDTH, WIDTH, device=cuda, dtype=torch.bfloat16)
    ends = torch.arange(1, EXPERTS + 1, device=cuda, dtype=torch.int32) * (TOKENS // EXPERTS)
    zeros = torch.zeros_like(x)
    found: dict[str, Callable[[], object]] = {
        "add_": lambda: scores.add_(0.0),
        "mul": lambda: x * 2.0,
        "mm": lambda: torch.mm(x, weights[0]),
        "index": lambda: x[order],
        "index_put": lambda: torch.ops.aten._index_put_impl_(zeros, [order], x, True, True),
        "sort": lambda: torch.sort(index),
        "topk": lambda: torch.topk(scores, 2, -1),
        "histc": lambda: torch.histc(index.int(), bins=EXPERTS, min=0, max=EXPERTS - 1),
        "cumsum": lambda: torch.cumsum(ends, 0, dtype=torch.int32),
        "nonzero": lambda: torch.nonzero(index),
    }
    if hasattr(F, "grouped_mm"):
        found["grouped_mm"] = lambda: F.grouped_mm(x, weights, offs=ends)
    return found


def host_seconds(call: Callable[[], object]) -> float:
    """The host's seconds per call. The device is synchronised before each round, so that its queue does not fill up."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS)
    return statistics.median(rounds)


def kernels(call: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(e.count for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a GPU")
    launch = timings.launch(torch.device("cuda"))
    print(json.dumps({"launch": launch}), flush=True)
    for name, call in calls().items():
        call()
        spent = host_seconds(call)
        row = {"call": name, "host_seconds": spent, "launches": round(spent / launch, 1), "kernels": kernels(call)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
