"""Time attention, convolutions and norms alone, forward and backward, on one GPU: what the planner's rates of them come from.

    python -m benchmarks.layer_rates > rates.jsonl

One JSON line for each layer and shape, within a minute. Attention: TFLOP/s; of causal attention only the half below the diagonal
counts. Other layers: seconds, and the microseconds of each CUDA kernel of one forward and backward.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Row = dict[str, Any]
DTYPE = torch.bfloat16
TOKENS = 16_384  # of all rows together
LENGTHS = (1024, 4096, 16_384, 65_536, 131_072)
HEADS = {32: 16, 64: 16, 80: 16, 96: 16, 128: 8, 256: 4}  # by width
IMAGES = ((128, 64, 16), (256, 32, 16), (512, 16, 16), (1024, 16, 16), (64, 128, 8), (128, 128, 8))  # channels, side, rows
DEPTHWISE = ((128, 56, 64), (256, 28, 64), (512, 14, 64), (1024, 7, 64))


def seconds(call: Callable[[], Any]) -> float:
    """The mean of 3 to 30 calls."""
    call()
    once = _timed(call, 1)
    return _timed(call, max(3, min(30, int(0.06 / max(once, 5e-5)))))


def _timed(call: Callable[[], Any], times: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / times / 1e3


def attention(width: int, length: int, causal: bool) -> Row:
    rows, heads = max(1, TOKENS // length), HEADS[width]
    inputs = [torch.randn(rows, heads, length, width, device="cuda", dtype=DTYPE, requires_grad=True) for _ in range(3)]
    forward = lambda: F.scaled_dot_product_attention(*inputs, is_causal=causal)
    gradient = torch.randn_like(inputs[0])
    there = seconds(forward)
    back = seconds(lambda: torch.autograd.grad(forward(), inputs, gradient)) - there
    flops = 4 * rows * heads * length**2 * width / (2 if causal else 1) / 1e12
    about: Row = {"kind": "attention", "width": width, "heads": heads, "length": length, "rows": rows, "causal": causal}
    return about | {"forward": flops / there, "backward": 2.5 * flops / back}


def layer(kind: str, module: nn.Module, x: Tensor) -> Row:
    module, x = module.to("cuda", DTYPE), x.to("cuda", DTYPE).requires_grad_()
    inputs, gradient = [x, *module.parameters()], torch.randn_like(module(x))
    there = seconds(lambda: module(x))
    both = lambda: torch.autograd.grad(module(x), inputs, gradient)
    about: Row = {"kind": kind, "x": list(x.shape), "y": list(gradient.shape), "forward": there}
    return about | {"backward": seconds(both) - there, "kernels": _kernels(both)}


def _kernels(call: Callable[[], Any]) -> list[tuple[int, str, int]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    timed = [e for e in profiler.key_averages() if e.device_time_total and not re.match("cuda|cu[A-Z]", e.key)]
    return [(e.count, e.key[:100], round(e.device_time_total)) for e in timed]


def rows() -> Iterator[Row]:
    for width in HEADS:
        for length in LENGTHS if width in (64, 128) else LENGTHS[:4]:
            yield attention(width, length, causal=True)
            if length <= TOKENS:
                yield attention(width, length, causal=False)
    for channels, side, count in IMAGES:
        x = torch.randn(count, channels, side, side)
        yield layer("convolution 3 × 3", nn.Conv2d(channels, channels, 3, padding=1), x)
        yield layer("convolution 1 × 1", nn.Conv2d(channels, channels, 1), x)
        yield layer("convolution 3 × 3, stride 2", nn.Conv2d(channels, 2 * channels, 3, 2, 1), x)
        yield layer("transposed convolution 2 × 2", nn.ConvTranspose2d(channels, channels, 2, 2), x)
        yield layer("group norm", nn.GroupNorm(8, channels), x)
        yield layer("silu", nn.SiLU(), x)
    for channels, side, count in DEPTHWISE:
        yield layer(
            "depthwise 7 × 7",
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            torch.randn(count, channels, side, side),
        )
    yield layer("patches of 16", nn.Conv2d(3, 1024, 16, 16), torch.randn(64, 3, 224, 224))
    for count, width in ((16_384, 1024), (65_536, 1024), (16_384, 4096)):
        x = torch.randn(count, width)
        for kind, module in (("layer norm", nn.LayerNorm(width)), ("gelu", nn.GELU()), ("softmax", nn.Softmax(-1))):
            yield layer(kind, module, x)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a GPU")
    print(json.dumps({"hardware": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for row in rows():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
