"""Compare predicted with measured memory of a training step, on one GPU as rank 0 of N in a fake process group.

    python -m benchmarks.memory_error --out FOLDER            # every case
    python -m benchmarks.memory_error --only '1.5b*'          # some cases

Each case runs in its own process, since reserved memory depends on what a process allocated before. A few run at once,
as the device's memory allows. `allocated` is the peak of the third step, `reserved` the peak since the model was
sharded. Writes `memory.json` with one row per case. For small cases it also writes the allocator's record of three steps
to `events.jsonl.gz`, in a folder for each. `memory_probe.py` measures what single kernels allocate.
"""

import argparse
import dataclasses
import fnmatch
import gc
import gzip
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard as fs
from benchmarks.memory_probe import clean, history
from fullshard import on_torch
from fullshard.model.presets import LlamaSize, preset
from fullshard.on_torch.model.built_in import GPT, Llama
from fullshard.planner.memory.peak_memory import predict as predict_memory


@dataclass(frozen=True)
class Case:
    name: str
    model: str = "llama3-8b"
    change: dict[str, Any] = field(default_factory=dict)  # of the preset's size
    strategy: str = "zero3"
    arguments: dict[str, Any] = field(default_factory=lambda: {"devices": 8})
    batch: tuple[int, int] = (1, 4096)
    accumulate: int = 1
    sync: str = "every"
    remat: str = "none"
    loss: str = "chunked"
    compute: str = "bf16"
    reduce: str = "fp32"
    trained: str = "all"  # all | lora | norms
    compile: bool = False
    prefetch: int = 1
    events: bool = False  # whether to keep the allocator's record

    @property
    def devices(self) -> int:
        a = self.arguments
        return a["devices"] if "devices" in a else a["replicate"] * a["shard"]


def devices(n: int, **more: Any) -> dict[str, Any]:
    return {"devices": n, **more}


FOUR = {"layers": 4}
CASES = [
    Case("1.5b-4x4096-plain", "llama-1.5b", batch=(4, 4096), loss="plain"),
    Case("1.5b-4x4096-plain-full", "llama-1.5b", batch=(4, 4096), loss="plain", remat="full"),
    Case("1.5b-4x4096-chunked", "llama-1.5b", batch=(4, 4096)),
    Case("1.5b-4x4096-chunked-full", "llama-1.5b", batch=(4, 4096), remat="full"),
    Case("1.5b-4x4096-chunked-selective", "llama-1.5b", batch=(4, 4096), remat="selective"),
    Case("1.5b-4x4096-n1", "llama-1.5b", batch=(4, 4096), loss="plain", arguments=devices(1)),
    Case("1.5b-2x2048-acc4", "llama-1.5b", batch=(2, 2048), accumulate=4),
    Case("1.5b-2x2048-acc4-last", "llama-1.5b", batch=(2, 2048), accumulate=4, sync="last"),
    Case("1.5b-tied", "llama3.2-1b", batch=(2, 4096), remat="full"),
    Case("1.5b-tied-plain", "llama3.2-1b", batch=(1, 4096), loss="plain"),
    Case("1.5b-fp32", "llama-1.5b", FOUR, batch=(1, 2048), compute="fp32"),
    Case("1.5b-reduce-bf16", "llama-1.5b", FOUR, batch=(1, 2048), reduce="bf16"),
    Case("1.5b-lora", "llama-1.5b", batch=(2, 2048), trained="lora"),
    Case("1.5b-norms", "llama-1.5b", FOUR, batch=(2, 2048), trained="norms", remat="full"),
    Case("1.5b-compiled", "llama-1.5b", FOUR, batch=(2, 4096), compile=True),
    Case("1.5b-compiled-full", "llama-1.5b", FOUR, batch=(2, 4096), compile=True, remat="full"),
    Case("8b-full", "llama3-8b", remat="full", loss="plain"),
    Case("8b-full-chunked-n64", "llama3-8b", remat="full", arguments=devices(64)),
    Case("8b-4-none", "llama3-8b", FOUR, batch=(2, 4096), events=True),
    Case("8b-4-none-plain", "llama3-8b", FOUR, loss="plain", events=True),
    Case("8b-4-selective", "llama3-8b", FOUR, batch=(2, 4096), remat="selective", events=True),
    Case("8b-4-full", "llama3-8b", FOUR, batch=(2, 8192), remat="full", events=True),
    Case("8b-4-zero2", "llama3-8b", FOUR, strategy="zero2", events=True),
    Case("8b-4-zero1", "llama3-8b", FOUR, strategy="zero1", accumulate=2, events=True),
    Case("8b-4-ddp", "llama3-8b", FOUR, strategy="ddp"),
    Case("8b-4-hybrid", "llama3-8b", FOUR, strategy="hybrid", arguments={"replicate": 4, "shard": 8}, events=True),
    Case("8b-4-hpz", "llama3-8b", FOUR, strategy="hpz", arguments=devices(32, reshard=8), events=True),
    Case("8b-4-mixed", "llama3-8b", FOUR, strategy="mixed", arguments=devices(16, replicate=["embed"]), events=True),
    Case("8b-4-last", "llama3-8b", FOUR, accumulate=3, sync="last", batch=(1, 2048), events=True),
    Case("8b-4-prefetch3", "llama3-8b", {"layers": 8}, prefetch=3, arguments=devices(64), remat="full", events=True),
    Case("8b-4-n512", "llama3-8b", FOUR, arguments=devices(512), batch=(1, 16384), remat="full"),
    Case("8b-4-3x1000", "llama3-8b", FOUR, batch=(3, 1000), events=True),
    Case("70b-2", "llama3-70b", {"layers": 2}, arguments=devices(64), batch=(1, 4096)),
    Case("70b-2-full", "llama3-70b", {"layers": 2}, arguments=devices(256), batch=(1, 8192), remat="full"),
    Case("7b-4-mha", "llama2-7b", FOUR, batch=(4, 2048), events=True),
    Case("gpt2-xl", "gpt2-xl", {"layers": 8}, batch=(8, 1024), loss="plain", events=True),
    Case("gpt2-dropout", "gpt2", {"dropout": 0.1}, batch=(16, 1024), events=True),
    Case("gpt2-n1", "gpt2", batch=(8, 1024), arguments=devices(1), remat="full"),
    Case("hf-llama", "hf:llama", batch=(2, 2048), events=True),
    Case("hf-llama-full", "hf:llama", batch=(4, 4096), remat="full"),
    Case("hf-qwen3", "hf:qwen3", batch=(2, 2048), events=True),
    Case("hf-gpt2", "hf:gpt2", batch=(4, 1024), events=True),
    Case("hf-mixtral", "hf:mixtral", batch=(1, 2048), events=True),
]
# Cases that were added after the memory model was fitted to those above: peaks inside blocks (a small vocabulary, many
# layers), other sizes, other model families.
NARROW = {"vocab": 8192}
CASES += [
    Case("new-8b-narrow", "llama3-8b", NARROW, batch=(2, 4096), loss="plain"),
    Case("new-8b-narrow-compiled", "llama3-8b", NARROW, batch=(2, 4096), loss="plain", compile=True),
    Case("new-8b-narrow-selective", "llama3-8b", NARROW, batch=(3, 4096), remat="selective"),
    Case("new-8b-narrow-full", "llama3-8b", NARROW, batch=(8, 4096), remat="full", arguments=devices(16)),
    Case("new-8b-narrow-zero2", "llama3-8b", NARROW | {"layers": 16}, batch=(2, 2048), strategy="zero2", arguments=devices(2)),
    Case("new-13b-full-n128", "llama2-13b", {"layers": 20}, batch=(2, 4096), remat="full", arguments=devices(128)),
    Case("new-13b-last", "llama2-13b", FOUR, batch=(2, 4096), accumulate=2, sync="last", arguments=devices(32), loss="plain"),
    Case("new-3b-fp16", "llama-3.6b", {"layers": 8}, batch=(2, 4096), compute="fp16", loss="plain"),
    Case("new-3b-tied-n2", "llama3.2-3b", {"layers": 10}, batch=(1, 8192), remat="selective", arguments=devices(2)),
    Case("new-125m-n1", "llama-125m", batch=(16, 2048), arguments=devices(1)),
    Case("new-125m-ddp", "llama-125m", batch=(8, 2048), strategy="ddp", arguments=devices(256), accumulate=2, sync="last"),
    Case("new-125m-1024", "llama-125m", NARROW, batch=(5, 777), arguments=devices(3)),
    Case(
        "new-70b-hybrid", "llama3-70b", {"layers": 3}, batch=(1, 4096), strategy="hybrid", arguments={"replicate": 8, "shard": 64}
    ),
    Case("new-gpt2-large", "gpt2-large", {"dropout": 0.1}, batch=(4, 1024), arguments=devices(4)),
    Case("new-gpt2-large-compiled", "gpt2-large", {"layers": 12}, batch=(8, 1024), arguments=devices(4), compile=True),
    Case("new-gpt2-medium-selective", "gpt2-medium", batch=(16, 1024), remat="selective", loss="plain", arguments=devices(16)),
    Case("new-1.5b-lora-full", "llama-1.5b", NARROW, batch=(8, 4096), trained="lora", remat="full"),
    Case("new-1.5b-compiled-selective", "llama-1.5b", NARROW, batch=(4, 4096), compile=True, remat="selective"),
    Case("new-1.5b-fp32-full", "llama-1.5b", {"layers": 6}, batch=(2, 2048), compute="fp32", remat="full"),
    Case("new-1.5b-prefetch", "llama-1.5b", NARROW, batch=(4, 4096), prefetch=2, remat="full", arguments=devices(32)),
    Case("new-hf-mistral", "hf:mistral", batch=(8, 2048), remat="full"),
    Case("new-hf-phi3", "hf:phi3", batch=(4, 2048)),
    Case("new-hf-olmo2", "hf:olmo2", batch=(2, 4096), loss="plain"),
    Case("new-hf-gpt-neox", "hf:gpt_neox", batch=(2, 2048)),
    Case("new-hf-qwen3-moe", "hf:qwen3_moe", batch=(2, 2048)),
    Case("new-hf-llama-compiled", "hf:llama", batch=(4, 4096), compile=True),
]


def hugging_face(kind: str) -> nn.Module:
    """A Hugging Face model of a common family, with few layers of ordinary width."""
    from transformers import AutoConfig, AutoModelForCausalLM

    wide = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 4, "num_attention_heads": 16}
    wide |= {"num_key_value_heads": 4, "vocab_size": 50_304, "use_cache": False}
    extra: dict[str, Any] = {
        "llama": wide,
        "qwen3": wide | {"head_dim": 128},
        "mixtral": wide | {"intermediate_size": 2048, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        "mistral": wide | {"sliding_window": None},
        "phi3": wide | {"pad_token_id": 0},
        "olmo2": wide,
        "gpt_neox": wide,
        "qwen3_moe": wide | {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 4},
        "gpt2": {"n_embd": 1024, "n_layer": 6, "n_head": 16, "use_cache": False},
    }[kind]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **extra))


class LoRA(nn.Module):
    """A frozen linear layer and its trained low-rank adapter."""

    def __init__(self, base: nn.Linear, rank: int = 16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def build(case: Case) -> nn.Module:
    """Build the case's model on meta."""
    with torch.device("meta"):
        if case.model.startswith("hf:"):
            model = hugging_face(case.model[3:])
        else:
            size = dataclasses.replace(preset(case.model), **case.change)
            model = Llama(size) if isinstance(size, LlamaSize) else GPT(size)
        if case.trained != "all":
            model.requires_grad_(False)
        for block in model.model.layers if case.trained == "lora" else ():
            block.self_attn.q_proj = LoRA(block.self_attn.q_proj)
            block.self_attn.v_proj = LoRA(block.self_attn.v_proj)
    for name, p in model.named_parameters():
        if case.trained == "norms" and "norm" in name:
            p.requires_grad_(True)
    return model


def plan_of(case: Case, description: fs.Description) -> fs.Plan:
    return fs.strategy(
        case.strategy,
        description,
        **case.arguments,
        precision=fs.Precision(compute=case.compute, reduce=case.reduce),
        batch=fs.Batch(*case.batch, case.accumulate, case.sync),
        remat=case.remat,
        compile=case.compile,
        prefetch=fs.Prefetch(case.prefetch, case.prefetch),
    )


def initial(module: nn.Module) -> None:
    """Initialise a module with cheap values: memory and time do not depend on them."""
    for p in module.parameters(recurse=False):
        p.normal_(std=0.02) if p.ndim > 1 else p.fill_(1.0)
    for name, b in module.named_buffers(recurse=False):
        if b.is_floating_point() and b.isnan().any():
            b.copy_(torch.linspace(1.0, 1e-4, b.numel(), device=b.device).view_as(b))
        assert name


# -- measuring ----------------------------------------------------------------------------------------


def measure(case: Case, with_prediction: bool) -> tuple[dict[str, Any], list[Any]]:
    """Measure one case. Returns its row, and the allocator's record if the case asks for it."""
    began = time.perf_counter()
    clean()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.devices)
    row: dict[str, Any] = {"name": case.name, "case": dataclasses.asdict(case), "leftover": torch.cuda.memory_allocated()}
    events: list[Any] = []
    try:
        row |= predict(case) if with_prediction else {}
        found, events = run_steps(case)
        row |= found
        for kind in ("allocated", "reserved"):
            if row.get(f"predicted_{kind}"):
                row[f"error_{kind}"] = row[f"predicted_{kind}"] / row[kind] - 1
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:2000]
    dist.destroy_process_group()
    row["seconds"] = round(time.perf_counter() - began, 2)
    return row, events


def predict(case: Case) -> dict[str, Any]:
    """The planner's prediction for a case."""
    began = time.perf_counter()
    description = on_torch.describe(build(case), micro_batch=case.batch[0], sequence=case.batch[1], compute=case.compute)
    traced = time.perf_counter()
    found = predict_memory(plan_of(case, description), description, loss=case.loss)
    return {
        "predicted_allocated": found.allocated,
        "predicted_reserved": found.reserved,
        "phase": str(found.phase),
        "terms": dict(found.terms),
        "trace_seconds": round(traced - began, 3),
        "predict_seconds": round(time.perf_counter() - traced, 3),
    }


def make_state(case: Case) -> tuple[on_torch.State, list[dict[str, torch.Tensor]]]:
    """The case's sharded model and the batches of a step."""
    model = build(case)
    plan = plan_of(case, on_torch.describe(model))
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-5), init=initial, device="cuda", first_step_checks=False)
    vocab = next(m for m in model.modules() if isinstance(m, nn.Embedding)).num_embeddings
    ids = torch.randint(0, vocab, (case.accumulate, case.batch[0], case.batch[1] + 1))
    return state, [{"input_ids": i[:, :-1].contiguous(), "labels": i[:, 1:].contiguous()} for i in ids]


LOSSES = {"plain": on_torch.summed_loss, "chunked": on_torch.chunked_loss}


def run_steps(case: Case) -> tuple[dict[str, Any], list[Any]]:
    """Run three steps. Returns their memory, and the allocator's record of each."""
    state, batches = make_state(case)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    row: dict[str, Any] = {"at_rest": torch.cuda.memory_allocated(), "steps": []}
    torch.cuda.reset_peak_memory_stats()
    events: list[Any] = []
    with history(case.events) as record:
        for _ in range(3):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            on_torch.train_step(state, batches, loss=LOSSES[case.loss], clip=1.0)
            torch.cuda.synchronize()
            row["steps"].append(
                {
                    "before": before,
                    "allocated": torch.cuda.max_memory_allocated(),
                    "reserved": torch.cuda.max_memory_reserved(),
                    "requested": torch.cuda.memory_stats()["requested_bytes.all.peak"],
                    "seconds": round(time.perf_counter() - start, 4),
                    "retries": torch.cuda.memory_stats()["num_alloc_retries"],
                }
            )
            events.append(record())
    row["allocated"] = row["steps"][-1]["allocated"]
    row["reserved"] = max(s["reserved"] for s in row["steps"])
    row["held"] = state.held_bytes()
    return row, events


# -- the command --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("memory_error"))
    parser.add_argument("--only", default="*", help="names of cases, with wildcards")
    parser.add_argument("--no-predict", action="store_true", help="measure only")
    parser.add_argument("--no-events", action="store_true", help="do not write the allocator's record")
    parser.add_argument("--at-once", type=int, default=3, help="cases that share the device")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: this benchmark needs a GPU; what can be checked without one is in tests/")
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    cases = [c for c in CASES if fnmatch.fnmatch(c.name, args.only)]
    if len(cases) > 1:
        run_apart(cases, about, args)
    else:
        run_here(cases[0], about, args)


def run_apart(cases: list[Case], about: dict[str, str], args: argparse.Namespace) -> None:
    """Run each case in a process of its own."""
    options = [o for o, wanted in (("--no-predict", args.no_predict), ("--no-events", args.no_events)) if wanted]
    rows: list[dict[str, Any]] = []

    def run(case: Case) -> list[dict[str, Any]]:
        own = args.out / case.name
        command = [sys.executable, "-m", "benchmarks.memory_error", "--only", case.name, "--out", str(own), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads((own / "memory.json").read_text())["rows"]

    with ThreadPoolExecutor(args.at_once) as pool:
        for found in pool.map(run, cases):
            rows += found
            print(line(rows[-1]), flush=True)
            (args.out / "memory.json").write_text(json.dumps({**about, "rows": rows}, indent=1))
    summarise(rows)


def run_here(case: Case, about: dict[str, str], args: argparse.Namespace) -> None:
    kept = dataclasses.replace(case, events=case.events and not args.no_events)
    row, record = measure(kept, not args.no_predict)
    if any(record):
        with gzip.open(args.out / "events.jsonl.gz", "wt") as file:
            file.write(json.dumps({"name": case.name, "steps": record}) + "\n")
    print(line(row), flush=True)
    (args.out / "memory.json").write_text(json.dumps({**about, "rows": [row]}, indent=1))


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']:32s} failed: {row['failed'][:200]}"
    text = f"{row['name']:32s} allocated {row['allocated'] / 2**30:8.3f} reserved {row['reserved'] / 2**30:8.3f} GiB"
    for kind in ("allocated", "reserved"):
        if f"error_{kind}" in row:
            text += f"  {kind} {100 * row[f'error_{kind}']:+.3f}%"
    return f"{text}  {row['seconds']:.1f} s"


def summarise(rows: list[dict[str, Any]]) -> None:
    for kind in ("allocated", "reserved"):
        for compiled in (False, True):
            errors = [abs(r[f"error_{kind}"]) for r in rows if f"error_{kind}" in r and r["case"]["compile"] is compiled]
            if errors:
                word = "compiled" if compiled else "eager"
                mean, worst = 100 * sum(errors) / len(errors), 100 * max(errors)
                print(f"{kind}, {word}: mean {mean:.3f}%, worst {worst:.3f}%, {len(errors)} rows")


if __name__ == "__main__":
    main()
