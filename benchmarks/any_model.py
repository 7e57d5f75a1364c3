"""Compare predicted with measured memory and step time of many kinds of models, on one GPU.

    python -m benchmarks.any_model --out FOLDER            # every model, under six minutes
    python -m benchmarks.any_model --only 'vit*' --measure # some, with a cluster file that is measured first

Each model runs in its own process. Processes predict at the same time and measure one after the other. `allocated` is the
peak of the third step, `reserved` the peak since the model was sharded, `seconds` the median of the steps after it.
Writes `any_model.json` to FOLDER, by default to $OUT.
"""

import argparse
import fcntl
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard as fs
from benchmarks.memory_error import initial
from fullshard import on_torch
from fullshard.cluster.topology import Cluster
from fullshard.on_torch.ranks.device_presets import local_cluster

WARM, STEPS = 3, 10
AT_ONCE = 6
LABELS = 1000
Row = dict[str, Any]


def started(module: nn.Module) -> None:
    """Fast initial values: what they are changes neither bytes nor seconds."""
    initial(module)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


# -- models that transformers does not have ------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, out: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.short = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class ResNet(nn.Module):
    """The shape of a ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, channels = [], 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            for i in range(depth):
                blocks.append(Bottleneck(channels, 64 << stage, 256 << stage, 2 if stage and not i else 1))
                channels = 256 << stage
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, LABELS)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Attended(nn.Module):
    """A residual block with attention over pixels and cross-attention to a text."""

    def __init__(self, channels: int, text: int, heads: int = 8):
        super().__init__()
        self.norm, self.first = nn.GroupNorm(32, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.inner, self.second = nn.GroupNorm(32, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.own, self.query, self.keys = (
            nn.Linear(channels, 3 * channels),
            nn.Linear(channels, channels),
            nn.Linear(text, 2 * channels),
        )
        self.heads = heads

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = x + self.second(F.silu(self.inner(self.first(F.silu(self.norm(x))))))
        flat = x.flatten(2).transpose(1, 2)
        flat = flat + self._attend(*self.own(flat).chunk(3, -1))
        flat = flat + self._attend(self.query(flat), *self.keys(text).chunk(2, -1))
        return flat.transpose(1, 2).reshape(x.shape)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v)]
        return F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)


class UNet(nn.Module):
    """A diffusion network of three widths, with skip connections."""

    def __init__(self, channels: int = 320, text: int = 768):
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.stem = nn.Conv2d(4, channels, 3, padding=1)
        self.down = nn.ModuleList([Attended(w, text) for w in widths])
        self.shrink = nn.ModuleList([nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths)])
        self.grow = nn.ModuleList([nn.Conv2d(b, a, 3, padding=1) for a, b in pairwise(widths)])
        self.up = nn.ModuleList([Attended(w, text) for w in widths[:-1]])
        self.out = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x, kept = self.stem(image), []
        for i, block in enumerate(self.down):
            x = block(x, text)
            if i < len(self.shrink):
                kept.append(x)
                x = self.shrink[i](x)
        for i in reversed(range(len(self.up))):
            x = self.grow[i](F.interpolate(x, scale_factor=2.0)) + kept[i]
            x = self.up[i](x, text)
        return self.out(x)


# -- batches and losses ----------------------------------------------------------------------------------


def logits(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits


def cross_entropy(out: Any, labels: Tensor) -> on_torch.Loss:
    flat = logits(out).flatten(0, -2).float()
    return on_torch.Loss(F.cross_entropy(flat, labels.flatten(), reduction="sum"), labels.numel())


def image_batch(rows: int) -> Any:
    return {"image": torch.randn(rows, 3, 224, 224), "labels": torch.arange(rows) % LABELS}


def image_loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    return cross_entropy(model(batch["image"]), batch["labels"])


def diffusion_batch(rows: int) -> Any:
    return {"image": torch.randn(rows, 4, 64, 64), "text": torch.randn(rows, 77, 768), "noise": torch.randn(rows, 4, 64, 64)}


def diffusion_loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    wrong = model(batch["image"], batch["text"]).float() - batch["noise"].float()
    return on_torch.Loss(wrong.pow(2).sum(), wrong.numel())


def masked_batch(rows: int) -> Any:
    ids = torch.randint(0, 30_000, (rows, 512))
    return {"ids": ids, "mask": torch.ones_like(ids), "labels": ids}


def masked_loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    return cross_entropy(model(input_ids=batch["ids"], attention_mask=batch["mask"]), batch["labels"])


def pair_batch(rows: int) -> Any:
    source, target = torch.randint(0, 30_000, (rows, 512)), torch.randint(0, 30_000, (rows, 128))
    return {"source": source, "target": target, "labels": target}


def pair_loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    return cross_entropy(model(batch["source"], decoder_input_ids=batch["target"], use_cache=False), batch["labels"])


# -- the models -----------------------------------------------------------------------------------------------


def hugging_face(kind: str, auto: str = "AutoModelForCausalLM", **size: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **size))

    return make


@dataclass(frozen=True)
class AnyCase:
    """A model and its batch: rows of tokens, or `batch(rows)` with a loss of its own."""

    make: Callable[[], nn.Module]
    rows: int
    batch: Callable[[int], Any] | None = None
    loss: Any = None
    tokens: int = 1024


def images(make: Callable[[], nn.Module], rows: int) -> AnyCase:
    return AnyCase(make, rows, image_batch, image_loss)


def vit(width: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width}
    return hugging_face("vit", "AutoModelForImageClassification", **size, num_labels=LABELS)


WIDE = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 4, "num_attention_heads": 16}
WIDE |= {"num_key_value_heads": 4, "vocab_size": 50_304, "use_cache": False}
SPARSE = WIDE | {"head_dim": 128, "num_experts_per_tok": 2}
CASES: dict[str, AnyCase] = {
    "vit-b": images(vit(768, 12, 12), 64),
    "vit-l": images(vit(1024, 24, 16), 32),
    "resnet-50": images(ResNet, 64),
    "unet": AnyCase(UNet, 8, diffusion_batch, diffusion_loss),
    "bert-large": AnyCase(
        hugging_face("bert", "AutoModelForMaskedLM", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                     intermediate_size=4096), 8, masked_batch, masked_loss,
    ),
    "t5-large": AnyCase(
        hugging_face("t5", "AutoModelForSeq2SeqLM", d_model=1024, d_ff=4096, d_kv=64, num_layers=12, num_heads=16), 8,
        pair_batch, pair_loss,
    ),
    "mamba": AnyCase(hugging_face("mamba", hidden_size=1024, num_hidden_layers=4, use_cache=False), 2, tokens=128),
    "mixtral": AnyCase(hugging_face("mixtral", **SPARSE | {"intermediate_size": 2048, "num_local_experts": 8}), 2),
    "gpt-oss": AnyCase(hugging_face("gpt_oss", **SPARSE | {"intermediate_size": 2048, "num_local_experts": 8}), 2),
    "olmoe": AnyCase(hugging_face("olmoe", **WIDE | {"intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 4}), 2),
    "falcon": AnyCase(hugging_face("falcon", hidden_size=2048, num_hidden_layers=4, num_attention_heads=32, use_cache=False), 2),
    "gemma2": AnyCase(hugging_face("gemma2", **WIDE | {"head_dim": 128}), 2),
    "opt": AnyCase(
        hugging_face("opt", hidden_size=2048, word_embed_proj_dim=2048, ffn_dim=8192, num_hidden_layers=4,
                     num_attention_heads=32, use_cache=False), 2,
    ),
    "phi": AnyCase(hugging_face("phi", **WIDE | {"num_key_value_heads": 16}), 2),
    "bloom": AnyCase(hugging_face("bloom", hidden_size=2048, n_layer=4, n_head=16, vocab_size=50_304, use_cache=False), 2),
}  # fmt: skip


def build(case: AnyCase) -> nn.Module:
    with torch.device("meta"):
        return case.make().train()


def describe(case: AnyCase) -> fs.Description:
    if case.batch is None:
        return on_torch.describe(build(case), micro_batch=case.rows, sequence=case.tokens)
    return on_torch.describe(build(case), example=case.batch(case.rows), loss=case.loss)


def plan_of(case: AnyCase, found: fs.Description) -> fs.Plan:
    batch = fs.Batch(case.rows, case.tokens) if case.batch is None else found.batch()
    return fs.zero3(found, devices=1, precision=fs.Precision(compute="bf16"), batch=batch)


def token_batch(model: nn.Module, case: AnyCase) -> Any:
    vocabulary = next(m for m in model.modules() if isinstance(m, nn.Embedding)).num_embeddings
    ids = torch.randint(0, vocabulary, (case.rows, case.tokens + 1))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


# -- one model in its own process -------------------------------------------------------------------------


def predict(case: AnyCase, cluster: Cluster) -> tuple[fs.Plan, Row]:
    began = time.perf_counter()
    found = describe(case)
    traced = time.perf_counter() - began
    plan = plan_of(case, found)
    loss = "chunked" if found.costs and found.costs.vocabulary else "plain"
    expected = fs.estimate(plan, found, cluster, loss=loss)
    return plan, {
        "loss": loss,
        "parameters": found.numel,
        "one_shape": bool(found.costs and found.costs.shape),
        "trace_seconds": round(traced, 2),
        "predicted_allocated": expected.device.allocated_bytes,
        "predicted_reserved": expected.device.reserved_bytes,
        "predicted_seconds": expected.step_seconds,
        "compute": expected.compute,
    }


def measure(case: AnyCase, plan: fs.Plan, named: str) -> Row:
    """Memory and seconds of real steps."""
    model = build(case)
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-5), init=started, device="cuda", first_step_checks=False)
    batch = token_batch(model, case) if case.batch is None else case.batch(case.rows)
    loss = case.loss or {"plain": on_torch.summed_loss, "chunked": on_torch.chunked_loss}[named]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    steps: list[float] = []
    row: Row = {}
    for i in range(WARM + STEPS):
        if i < WARM:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        on_torch.train_step(state, [batch], loss=loss, clip=1.0)
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - start)
        if i == WARM - 1:
            row = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return row | {"seconds": statistics.median(steps[WARM:]), "steps": steps}


def run_here(name: str, out: Path, cluster: Cluster) -> None:
    row: Row = {"name": name}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        plan, expected = predict(CASES[name], cluster)
        row |= expected
        with (out / "gpu.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            row |= measure(CASES[name], plan, row["loss"])
        for kind in ("allocated", "reserved", "seconds"):
            row[f"error_{kind}"] = row[f"predicted_{kind}"] / row[kind] - 1
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:2000]
    (out / f"{name}.json").write_text(json.dumps(row, indent=1))


# -- the command ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "any_model")))
    parser.add_argument("--only", default="*", help="names of models, with wildcards")
    parser.add_argument("--measure", action="store_true", help="measure this machine first; else its preset is used")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "error: this benchmark needs a GPU; what can be checked without one is in tests/cpu/test_any_describe.py"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "cluster.json"
    if args.one:
        run_here(args.one, args.out, Cluster.load(file))
        return
    (on_torch.measure() if args.measure else local_cluster(1)).save(file)
    names = [n for n in CASES if fnmatch.fnmatch(n, args.only)]
    about = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    rows: list[Row] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row in pool.map(lambda name: run_apart(name, args.out), names):
            rows.append(row)
            print(line(row), flush=True)
            (args.out / "any_model.json").write_text(json.dumps({**about, "rows": rows}, indent=1))
    for kind in ("allocated", "reserved", "seconds"):
        if errors := [abs(r[f"error_{kind}"]) for r in rows if f"error_{kind}" in r]:
            print(f"{kind}: mean {statistics.mean(errors):.2%}, worst {max(errors):.2%}, {len(errors)} models")


def run_apart(name: str, out: Path) -> Row:
    command = [sys.executable, "-m", "benchmarks.any_model", "--one", name, "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    file = out / f"{name}.json"
    if not file.exists():
        return {"name": name, "failed": f"exit code {done.returncode}: {done.stderr[-1000:]}"}
    return json.loads(file.read_text())


def line(row: Row) -> str:
    if "failed" in row:
        return f"{row['name']:12s} failed: {row['failed'][:300]}"
    text = f"{row['name']:12s} allocated {row['allocated'] / 2**30:7.3f} reserved {row['reserved'] / 2**30:7.3f} GiB"
    text += f"  step {1000 * row['seconds']:8.2f} ms  predicted {row['error_allocated']:+.2%} {row['error_reserved']:+.2%}"
    return f"{text} {row['error_seconds']:+.1%}  traced in {row['trace_seconds']:.1f} s"


if __name__ == "__main__":
    main()
