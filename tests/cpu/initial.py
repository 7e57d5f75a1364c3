"""Initial weights, inside ranks."""

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard import FullshardError, on_torch
from fullshard.model.presets import LlamaSize
from fullshard.on_torch.model.built_in import Llama
from tests.cpu import hugging_face, parity


def build(name: str) -> nn.Module:
    return parity.build(name) if name in ("plain", "tied", "lora") else hugging_face.build(name)


def digest(name: str, strategy: str, arguments: dict, grouping: dict | None = None) -> dict[str, str]:
    """A hash of every initial parameter and buffer, gathered whole."""
    model = build(name)
    plan = fs.strategy(strategy, on_torch.describe(model, **(grouping or {})), **arguments)
    state = on_torch.shard(model, plan, seed=3)
    tensors = {n: p.full_tensor().detach() for n, p in state.model.named_parameters()} | dict(state.model.named_buffers())
    return {n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in tensors.items()}


def unsharded_digest(name: str) -> dict[str, str]:
    model = build(name)
    on_torch.initialize(model, torch.device("cpu"), seed=3)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {n: hashlib.sha256(t.detach().contiguous().numpy().tobytes()).hexdigest() for n, t in tensors.items()}


def peak_while_sharding() -> tuple[int, int, int, int]:
    """How far this process's resident memory rose while sharding; bytes of its shards, the largest unit, the model."""
    with torch.device("meta"):
        model = Llama(LlamaSize(dim=512, layers=16, heads=8, kv_heads=8, ffn=1536, vocab=512))
    description = on_torch.describe(model)
    plan = fs.zero3(description, devices=dist.get_world_size())
    _resident(reset=True)
    before = _resident()
    state = on_torch.shard(model, plan)
    rose = _resident() - before
    return rose, state.held_bytes()["params"], max(u.nbytes for u in description.units), description.nbytes


def _resident(*, reset: bool = False) -> int:
    """Peak resident bytes since the last reset, as the kernel counts them."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Forgetful(nn.Module):
    """A buffer that only `__init__` computes: gone on meta."""

    def __init__(self, kind: str):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        if kind == "float":
            self.register_buffer("table", torch.arange(4.0))
        elif kind == "bool":
            self.register_buffer("table", torch.ones(4, dtype=torch.bool))
        else:
            self.table = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.layers[0](x) * self.table


def forgotten(kind: str, *, init: bool = False) -> str:
    with torch.device("meta"):
        model = Forgetful(kind)

    def rule(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        if isinstance(module, Forgetful):
            with torch.no_grad():
                module.table.fill_(1)

    try:
        on_torch.shard(model, fs.zero3(on_torch.describe(model), devices=dist.get_world_size()), init=rule if init else None)
    except FullshardError as error:
        return str(error)
    return "no error"


def statistics() -> dict[str, float]:
    """What the model's own rules would give: a mean of 0, a deviation of 0.02, norms of 1, LoRA's B of 0."""
    model = build("lora")
    state = on_torch.shard(model, fs.zero3(on_torch.describe(model), devices=dist.get_world_size()), seed=3)
    full = {n: p.full_tensor().detach() for n, p in state.model.named_parameters()}
    head = next(t for n, t in full.items() if n.endswith("lm_head.weight"))
    return {
        "std": float(head.std()),
        "norm": float(next(t for n, t in full.items() if n.endswith("model.norm.weight")).min()),
        "lora_B": max(float(t.abs().max()) for n, t in full.items() if "lora_B" in n),
        "lora_A": min(float(t.std()) for n, t in full.items() if "lora_A" in n),
    }
