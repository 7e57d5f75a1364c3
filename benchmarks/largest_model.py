"""Train the largest model that fits one GPU with its host, and compare memory with the estimate.

    python -m benchmarks.largest_model plan --layers 84 --no-clip --out plan.json     # needs no GPU
    python -m benchmarks.largest_model train --layers 84 --no-clip --plan plan.json
    python -m benchmarks.largest_model train --layers 92 --no-clip --plan with-disk.json --disk /disk

The model has blocks of llama3-8b, as many as `--layers` says, and AdamW with fp32 masters and moments for every parameter; rows
of 4,096 tokens, bf16, full remat where the search chooses it. `plan` searches for an H200 beside `--host` GiB of memory and
`--disk-space` GiB of disk. `train` prints one JSON line: losses, seconds of each step, and measured beside predicted bytes.
"""

import argparse
import json
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fullshard as fs
from fullshard import on_torch
from fullshard.model.presets import LlamaSize, preset
from fullshard.on_torch.model.built_in import Llama

GIB = 1 << 30
SEQUENCE = 4096


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="what", required=True)
    plan, train = sub.add_parser("plan"), sub.add_parser("train")
    for command in (plan, train):
        command.add_argument("--layers", type=int, required=True)
        command.add_argument("--no-clip", dest="clip", action="store_false")
    plan.add_argument("--host", type=float, default=128)
    plan.add_argument("--disk-space", type=float, default=0)
    plan.add_argument("--out", type=Path, required=True)
    train.add_argument("--plan", type=Path, required=True)
    train.add_argument("--disk", type=Path)
    train.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


def model_of(layers: int) -> Llama:
    size = preset("llama3-8b")
    assert isinstance(size, LlamaSize)
    with torch.device("meta"):
        return Llama(replace(size, layers=layers))


def search(args: argparse.Namespace) -> dict[str, Any]:
    """Write the fastest plan that fits, with its estimate."""
    described = on_torch.describe(model_of(args.layers), micro_batch=1, sequence=SEQUENCE, compute="bf16")
    cluster = fs.Cluster.load("1xh200")
    host = replace(cluster.node.host, memory=int(args.host * GIB), disk=int(args.disk_space * GIB) or 1)
    cluster = replace(cluster, node=replace(cluster.node, host=host))
    shape = {"sequence": SEQUENCE, "global_batch": 1, "clip": args.clip, "disk": bool(args.disk_space)}
    found = fs.find_plan(described, cluster, fix={"compute": "bf16", "compile": True}, **shape)
    e = found.estimate
    predicted = {"device": e.device.reserved_bytes, "host": e.host.allocated_bytes, "disk": e.disk.allocated_bytes}
    args.out.write_text(json.dumps({"plan": found.plan.to_dict(), "step_s": e.step_seconds, **predicted}))
    return {"step_s": e.step_seconds, **{k: (v or 0) / GIB for k, v in predicted.items()}}


def train(args: argparse.Namespace) -> dict[str, Any]:
    device = on_torch.start()
    written = json.loads(args.plan.read_text())
    plan = fs.Plan.from_dict(written.pop("plan"))
    model = model_of(args.layers)
    parameters = sum(p.numel() for p in model.parameters())
    began = time.perf_counter()
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-4), disk=args.disk, first_step_checks=False)
    ready = time.perf_counter() - began
    print(json.dumps({"parameters": parameters, "ready_s": round(ready, 1)}), flush=True)
    ids = torch.randint(0, preset("llama3-8b").vocab, (1, SEQUENCE + 1), device=device)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    losses, seconds = [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        result = on_torch.train_step(state, [batch], loss=on_torch.chunked_loss, clip=1.0 if args.clip else None)
        losses.append(result.numbers()[0])
        seconds.append(time.perf_counter() - start)
        print(json.dumps({"loss": losses[-1], "seconds": seconds[-1]}), flush=True)
    start = time.perf_counter()
    state.flush()
    measured = {"host_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        measured |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    rounded = {k: round(v / GIB, 2) for k, v in measured.items()}
    predicted = {k: round((v or 0) / (1 if k == "step_s" else GIB), 2) for k, v in written.items()}
    return {
        "parameters": parameters,
        "losses": losses,
        "seconds": seconds,
        "flush_s": time.perf_counter() - start,
        "measured_gib": rounded,
        "predicted": predicted,
        "kernels": state.kernels,
    }


def main() -> None:
    args = arguments()
    print(json.dumps(search(args) if args.what == "plan" else train(args)), flush=True)
    if args.what == "train":
        on_torch.finish()


if __name__ == "__main__":
    main()
