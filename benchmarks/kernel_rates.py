"""Time kernels of a resident step alone, on one GPU: attention by backend, the loss, the update.

    python -m benchmarks.kernel_rates

One JSON line for each kernel and shape: milliseconds, and bytes of workspace in attention's backward, or TB/s of memory traffic.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from fullshard.on_torch.loss import triton_softmax
from fullshard.on_torch.optimizers import triton_one_pass
from fullshard.on_torch.parallelize.attention_backend import BACKENDS

SHAPES = [
    (4, 32, 8, 4096, 64),
    (2, 24, 8, 4096, 128),
    (1, 32, 8, 4096, 128),
    (2, 16, 16, 4096, 128),
]  # rows, heads, key heads, tokens, width
ELEMENTS, ROWS, VOCABULARY = 200_000_000, 4096, 128_256
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def milliseconds(call: Callable[[], Any], times: int = 20) -> float:
    for _ in range(3):
        call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / times


def attention(kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    rows, heads, key_heads, tokens, width = shape
    make = lambda n: torch.randn(rows, n, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inputs = [make(heads), make(key_heads), make(key_heads)]
    with sdpa_kernel(BACKENDS[kind]):
        forward = lambda: F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        out = forward()
        gradient = torch.randn_like(out)
        backward = lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = sum(g.numel() * g.element_size() for g in backward())
        workspace = torch.cuda.max_memory_allocated() - before - results
        found = {"forward_ms": milliseconds(forward), "backward_ms": milliseconds(backward)}
    return {"kernel": f"attention {kind}", "shape": shape, **found, "workspace": workspace}


def loss() -> dict[str, Any]:
    logits = torch.randn(ROWS, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, VOCABULARY, (ROWS,), device="cuda")
    found = milliseconds(lambda: triton_softmax.loss_and_gradient(logits, labels, -100))
    return {"kernel": "loss", "shape": (ROWS, VOCABULARY), "ms": found, "tb_s": 3 * 2 * logits.numel() / found / 1e9}


def update() -> dict[str, Any]:
    parameter, first, second = (torch.rand(ELEMENTS, device="cuda") for _ in range(3))
    gradient, skip = torch.randn(ELEMENTS, device="cuda").bfloat16(), torch.zeros((), device="cuda")
    factors, powers = torch.tensor([0.9], device="cuda"), torch.tensor([0.9, 0.95], device="cuda")
    tensors = (parameter, gradient, first, second)
    found = milliseconds(lambda: triton_one_pass.update_parameter("adamw", tensors, factors, skip, powers, SETTINGS))
    copied = milliseconds(lambda: first.copy_(second))
    rates = {"tb_s": 26 * ELEMENTS / found / 1e9, "copy_tb_s": 8 * ELEMENTS / copied / 1e9}
    return {"kernel": "update", "shape": (ELEMENTS,), "ms": found, **rates}


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a GPU")
    for shape in SHAPES:
        for kind in BACKENDS:
            print(json.dumps(attention(kind, shape)), flush=True)
    print(json.dumps(loss()), flush=True)
    print(json.dumps(update()), flush=True)


if __name__ == "__main__":
    main()
