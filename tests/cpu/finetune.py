"""Runs inside the ranks: reading weights, and what it costs."""

import os
from pathlib import Path

import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.model.weights import Weights


def load(directory: str, strategy: str, tensor: int = 1, lora: bool = False) -> dict:
    """Shard the model in `directory` with its weights; every parameter whole, and what reading took."""
    model = on_torch.load_model(directory)
    if lora:
        model = on_torch.add_adapters(model, rank=4, alpha=8, dropout=0.0, targets=["q_proj", "v_proj"])
    plan = fs.strategy(strategy, on_torch.describe(model), devices=dist.get_world_size(), tensor=tensor)
    before = read_bytes()
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), weights=directory)
    read = read_bytes() - before
    params = {n: p.detach().full_tensor() for n, p in state.model.named_parameters()}
    shard = sum(p.to_local().numel() * p.element_size() for p in state.parameters())
    return {"read": read, "shard": shard, "params": params}


def read_bytes() -> int:
    """What this process has read through system calls, as the kernel counts it."""
    return int(Path("/proc/self/io").read_text().split()[1])


def counted(directory: str) -> int:
    """What `Weights` says it read, for a zero3 plan."""
    model = on_torch.load_model(directory)
    plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size())
    weights = Weights(model, directory)
    state = on_torch.shard(model, plan)  # drawn, then overwritten
    weights.read(state.model)
    return weights.files.bytes_read


def host_peak(directory: str, small: str) -> dict:
    """What sharding with weights adds to the resident bytes at its peak. A small model goes first: code that was never run is
    not resident yet."""
    load(small, "zero3")
    model = on_torch.load_model(directory)
    description = on_torch.describe(model)
    plan = fs.zero3(description, devices=dist.get_world_size())
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    state = on_torch.shard(model, plan, weights=directory)
    shard = sum(p.to_local().numel() * 4 for p in state.parameters())
    return {"peak": resident("VmHWM") - before, "shard": shard, "unit": max(u.nbytes for u in description.units)}


def resident(key: str) -> int:
    line = next(line for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def refusal(directory: str, weights: str) -> str:
    try:
        model = on_torch.load_model(directory)
        plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size())
        on_torch.shard(model, plan, weights=weights)
    except fs.FullshardError as error:
        return str(error)
    return "accepted"
