"""Measure what single CUDA kernels allocate. `model.kernel_workspace` is based on these measurements.

    python -m benchmarks.memory_probe --out FOLDER      # one GPU; writes probe.json

`visible` is the memory that remains after the call, `hidden` what is allocated and freed inside it. `events` is the
allocator's record of the call.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import on_torch


def clean() -> None:
    """Free everything from before: tensors, cuBLAS workspaces and cached segments."""
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def history(wanted: bool) -> Iterator[Callable[[], list[Any]]]:
    """Gives a function that returns the allocator's actions since the last call: [action, size, address, stream]."""
    if not wanted:
        yield lambda: []
        return
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=2_000_000)
    seen = 0

    def record() -> list[Any]:
        nonlocal seen
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        new, seen = trace[seen:], len(trace)
        return [[e["action"], e["size"], e.get("addr", 0), e.get("stream", 0)] for e in new]

    try:
        yield record
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class Probes:
    """Runs probes and keeps their rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def probe(self, name: str, make: Callable[[], Callable[[], Any]], *, warm: bool = True) -> None:
        """Measure the call that `make` returns. `make` allocates the inputs, so that they do not count."""
        try:
            row = _probe(make, warm)
        except Exception as error:
            row = {"failed": f"{type(error).__name__}: {error}"[:500]}
        self.rows.append({"name": name, **row})
        print(f"{name:60s} hidden {row.get('hidden', row.get('failed'))}  {row.get('made_by', '')}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()

    def forward(self, name: str, f: Callable[..., Any], inputs: Callable[[], Any], *, warm: bool = True) -> None:
        def make() -> Callable[[], Any]:
            made = inputs()
            return lambda: f(*made)

        self.probe(name, make, warm=warm)

    def both(self, name: str, f: Callable[..., Any], inputs: Callable[[], Any]) -> None:
        """Measure forward, and backward with forward's saved tensors alive."""

        def backward() -> Callable[[], Any]:
            out = f(*inputs())
            grad = torch.randn_like(out)
            return lambda: torch.autograd.backward(out, grad)

        self.forward(f"{name}, forward", f, inputs)
        self.probe(f"{name}, backward", backward)


def _probe(make: Callable[[], Callable[[], Any]], warm: bool) -> dict[str, Any]:
    if warm:
        make()()
        gc.collect()
    call = make()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with history(True) as record:
        out = call()
        torch.cuda.synchronize()
        events = record()
    grown = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    made = type(out.grad_fn).__name__ if isinstance(out, Tensor) and out.grad_fn is not None else ""
    short = [[e[0], e[1], e[3]] for e in events if e[0] in ("alloc", "free_requested")]
    return {"peak": peak, "visible": grown, "hidden": peak - grown, "made_by": made, "events": short[:400]}


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def plain(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, device="cuda")


def gemm(p: Probes) -> None:
    p.forward("gemm, cold", torch.matmul, lambda: (plain(256, 512), plain(512, 256)), warm=False)
    p.forward("gemm, warm", torch.matmul, lambda: (plain(256, 512), plain(512, 256)))
    p.forward("linear with bias, cold", F.linear, lambda: (plain(2, 256, 512), plain(256, 512), plain(256)), warm=False)
    p.forward(
        "gemm fp32, warm", torch.matmul, lambda: (plain(256, 512, dtype=torch.float32), plain(512, 256, dtype=torch.float32))
    )
    p.both("linear", F.linear, lambda: (rand(2, 2048, 2048), rand(8192, 2048)))
    p.both("linear with bias", F.linear, lambda: (rand(2, 2048, 1600), rand(6400, 1600), rand(6400)))
    out = lambda: torch.zeros(8192, 2048, device="cuda")
    if hasattr(torch.ops.aten.addmm, "dtype_out"):
        add = lambda t, a, b: torch.ops.aten.addmm.dtype_out(t, a, b, torch.float32, out=t)
        p.forward("addmm into fp32", add, lambda: (out(), plain(4096, 8192).t(), plain(4096, 2048)))


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1], **options)


def attention(p: Probes) -> None:
    shapes = [(1, 32, 8, 4096, 128), (2, 32, 8, 2048, 128), (2, 32, 32, 1024, 64), (3, 16, 4, 1000, 128), (1, 64, 8, 8192, 128)]
    shapes += [(4, 25, 25, 1024, 64), (2, 12, 4, 512, 64), (1, 8, 8, 100, 32), (1, 8, 2, 4096, 256), (2, 24, 8, 4096, 96)]
    for b, h, k, t, d in shapes:
        tag = f"b{b} h{h} kv{k} t{t} d{d}"
        # As in a model without rotary embedding: (B, T, H, D) viewed as (B, H, T, D).
        views = lambda b=b, h=h, k=k, t=t, d=d: [plain(b, t, n, d).transpose(1, 2).requires_grad_() for n in (h, k, k)]
        dense = lambda b=b, h=h, k=k, t=t, d=d: [rand(b, n, t, d) for n in (h, k, k)]
        p.both(f"attention {tag}", attend, views)
        p.both(f"attention dense {tag}", attend, dense)
    three = lambda dtype=torch.bfloat16: [rand(2, 16, 1024, 64, dtype=dtype) for _ in range(3)]
    p.both("attention with dropout", lambda *x: attend(*x, dropout_p=0.1), three)
    p.both("attention fp32", attend, lambda: three(torch.float32))
    p.both("attention fp32 gqa", attend, lambda: [rand(2, n, 1024, 64, dtype=torch.float32) for n in (16, 4, 4)])
    mask = torch.ones(1024, 1024, device="cuda", dtype=torch.bool).tril()
    p.both("attention with a mask", lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask), three)


def layers(p: Probes) -> None:
    for rows, dim in ((4096, 2048), (8192, 4096), (3000, 8192), (8192, 1600), (1024, 128)):
        p.both(
            f"rms_norm {rows}x{dim}",
            lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-5),
            lambda r=rows, d=dim: (rand(r, d), rand(d)),
        )
        norm = lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b)
        p.both(f"layer_norm {rows}x{dim}", norm, lambda r=rows, d=dim: (rand(r, d), rand(d), rand(d)))
    tables = [(4096, 128_256, 4096), (16_384, 128_256, 2048), (8192, 50_257, 1600), (1000, 32_000, 768), (1024, 1024, 64)]
    for tokens, vocab, dim in [*tables, (3072, 32_000, 768), (3073, 32_000, 768), (65_536, 32_000, 768)]:
        p.both(
            f"embedding {tokens} of {vocab}x{dim}",
            lambda i, w: F.embedding(i, w),
            lambda n=tokens, v=vocab, d=dim: (integers(v, 1, n), rand(v, d)),
        )
    wide = lambda: (rand(2, 2048, 8192),)
    p.both("silu", F.silu, wide)
    p.both("gelu", F.gelu, wide)
    p.both("dropout", lambda x: F.dropout(x, 0.1), wide)
    p.forward("cat", lambda a, b: torch.cat((a, b), -1), lambda: (plain(2, 32, 2048, 64), plain(2, 32, 2048, 64)))
    p.forward("mean of squares", lambda x: x.pow(2).mean(-1, keepdim=True), lambda: (plain(2, 2048, 2048, dtype=torch.float32),))
    p.forward("sum over rows", lambda x: x.sum(0), lambda: (plain(4096, 2048),))
    p.forward("sum over two dims", lambda x: x.sum((0, 1)), lambda: (plain(2, 2048, 2048),))
    p.forward("sum of all", lambda x: x.sum(), lambda: (plain(4096, 2048, dtype=torch.float32),))


def losses(p: Probes) -> None:
    whole = lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y, ignore_index=-100, reduction="sum")
    for tokens, dim, vocab in ((4096, 2048, 128_256), (2048, 1600, 50_257)):
        made = lambda n=tokens, d=dim, v=vocab: (rand(n, d), rand(v, d), integers(v, n))
        p.both(f"plain loss {tokens} x {dim} x {vocab}", whole, made)
        p.both(f"chunked loss {tokens} x {dim} x {vocab}", on_torch.chunked_cross_entropy, made)


def adam(count: int) -> Callable[[], Any]:
    params = [nn.Parameter(plain(1024, 1024, dtype=torch.float32)) for _ in range(count)]
    made = torch.optim.AdamW(params, lr=1e-4, fused=True)
    for _ in range(2):
        for p in params:
            p.grad = torch.zeros_like(p)
        made.step()
    return made.step


def optimizer(p: Probes) -> None:
    for count in (4, 150):
        many = lambda n=count: ([plain(512, 512, dtype=torch.float32) for _ in range(n)],)
        p.probe(f"fused AdamW, {count} tensors", lambda n=count: adam(n))
        p.forward(f"foreach norm, {count} tensors", lambda t: torch._foreach_norm(t, 2.0), many)
        p.forward(f"total norm, {count} tensors", lambda t: nn.utils.get_total_norm(t, 2.0), many)
        p.forward(f"foreach mul, {count} tensors", lambda t: torch._foreach_mul_(t, torch.ones((), device="cuda")), many)
    p.forward("foreach norm, large", lambda t: torch._foreach_norm([t], 2.0), lambda: (plain(16_384, 8192, dtype=torch.float32),))


def fsdp(p: Probes) -> None:
    nine = lambda dtype: [plain(1024, 512, dtype=dtype) for _ in range(9)]
    for source in (torch.float32, torch.bfloat16):
        p.forward(f"foreach copy {source} to bf16", torch._foreach_copy_, lambda s=source: (nine(torch.bfloat16), nine(s)))
    cat = lambda grads, out: torch._chunk_cat(grads, 0, 8, out=out)
    p.forward("chunk cat", cat, lambda: (nine(torch.bfloat16), plain(8, 9 * 1024 * 64, dtype=torch.float32)))
    p.forward("chunk cat, one dtype", cat, lambda: (nine(torch.bfloat16), plain(8, 9 * 1024 * 64)))
    split = lambda flat, out: torch.split_with_sizes_copy(flat, [1024] * 9, dim=1, out=out)
    p.forward("split with sizes copy", split, lambda: (plain(8, 9 * 1024), [plain(8, 1024) for _ in range(9)]))


def experts(p: Probes) -> None:
    p.forward("topk", lambda x: torch.topk(x, 8, -1), lambda: (plain(4096, 64, dtype=torch.float32),))
    p.forward("sort", torch.sort, lambda: (integers(64, 8192),))
    p.forward("argsort", torch.argsort, lambda: (integers(64, 32_768),))
    p.forward("histc", lambda x: torch.histc(x.int(), bins=8, min=0, max=7), lambda: (integers(8, 8192),))
    p.forward("cumsum", lambda x: x.cumsum(0, dtype=torch.int32), lambda: (integers(8, 8),))
    p.forward("nonzero", torch.nonzero, lambda: (integers(2, 8192),))
    index = torch.randperm(4096, device="cuda")
    p.both("index rows", lambda x: x[index], lambda: (rand(4096, 2048),))
    p.forward("index_add", lambda x, y: x.index_add_(0, index, y), lambda: (plain(4096, 2048), plain(4096, 2048)))
    if hasattr(F, "grouped_mm"):
        ends = torch.tensor([512, 1024, 2048, 4096], device="cuda", dtype=torch.int32)
        p.both("grouped_mm", lambda x, w: F.grouped_mm(x, w, offs=ends), lambda: (rand(4096, 1024), rand(4, 1024, 512)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("memory_error"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a GPU")
    args.out.mkdir(parents=True, exist_ok=True)
    clean()
    probes = Probes()
    for group in (gemm, attention, layers, losses, optimizer, fsdp, experts):
        group(probes)
    about = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    (args.out / "probe.json").write_text(json.dumps({**about, "rows": probes.rows}))


if __name__ == "__main__":
    main()
