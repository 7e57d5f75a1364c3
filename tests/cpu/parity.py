"""Training the same thing twice: through fullshard, and with nothing but torch. Runs inside ranks."""

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fullshard as fs
from fullshard import on_torch
from fullshard.model.presets import LlamaSize
from fullshard.on_torch.model.built_in import Llama

DEVICE = os.environ.get("FULLSHARD_TEST_DEVICE", "cpu")  # the GPU tests run the same code
VOCAB, ROWS, LENGTH, STEPS, LR = 50, 16, 12, 4, 1e-4
# No dimension but the heads' divides by 4: shards are uneven, some ranks hold padding.
SIZE = LlamaSize(dim=24, layers=3, heads=4, kv_heads=2, ffn=42, vocab=VOCAB, sequence=64)


@dataclass(frozen=True)
class Case:
    strategy: str = "zero3"
    arguments: dict = field(default_factory=dict)
    compute: str = "fp32"
    remat: str = "none"
    accumulate: int = 1
    sync: str = "every"
    kind: str = "plain"  # plain | tied | lora
    clip: float | None = None
    prefetch: int = 1
    loss: str = "summed"  # summed | chunked
    steps: int = STEPS

    def __str__(self) -> str:
        extra = "-".join(f"{k}{v}" for k, v in self.arguments.items() if k != "devices")
        return "-".join(str(p) for p in (self.strategy, extra, self.compute, self.remat, f"acc{self.accumulate}", self.kind) if p)


def build(kind: str) -> torch.nn.Module:
    """The model on meta."""
    size = LlamaSize(**{**vars(SIZE), "tied": kind == "tied"})
    with torch.device("meta"):
        model = Llama(size)
        if kind == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    return model


def checked(model: torch.nn.Module) -> bool:
    """Whether a run of this model passes the first step's checks: adapters on weights that are drawn do not."""
    return not any(".lora_" in name for name, _ in model.named_parameters())


def data(steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """The global batch of each step, with labels missing unevenly: ranks have different token counts."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=draw)
        labels = ids[:, 1:].clone()
        for row in range(ROWS):
            labels[row, : row % 5] = -100
        found.append({"input_ids": ids[:, :-1].to(DEVICE), "labels": labels.to(DEVICE)})
    return found


def unsharded(kind: str, parts: int, clip: float | None = None, steps: int = STEPS, model: torch.nn.Module | None = None):
    """The oracle: one process, torch's AdamW, gradients accumulated over the same micro-batches.

    The same, because Adam divides by the gradient's size: an element whose gradient nearly cancels over the
    batch would turn another order of summation into another update.
    """
    if model is None:
        model = build(kind)
        on_torch.initialize(model, torch.device(DEVICE), seed=7)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses, norms = [], []
    for batch in data(steps):
        tokens, total = (batch["labels"] != -100).sum(), 0.0
        for ids, labels in zip(batch["input_ids"].chunk(parts), batch["labels"].chunk(parts), strict=True):
            logits = model(ids)
            logits = logits if isinstance(logits, torch.Tensor) else logits.logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms, {n: p.detach().clone().cpu() for n, p in model.named_parameters()}


def _mine(batch: dict, rank: int, data_ranks: int, accumulate: int) -> list[dict]:
    """This data rank's micro-batches of a global batch."""
    rows = ROWS // data_ranks // accumulate
    start = rank * rows * accumulate
    return [{k: v[start + i * rows : start + (i + 1) * rows] for k, v in batch.items()} for i in range(accumulate)]


def sharded(case: Case, model: torch.nn.Module | None = None):
    """The same through fullshard."""
    model = build(case.kind) if model is None else model
    world, tensor = dist.get_world_size(), case.arguments.get("tensor", 1)
    arguments = {"devices": world, **case.arguments} if case.strategy != "hybrid" else dict(case.arguments)
    rows = ROWS // (world // tensor) // case.accumulate
    plan = fs.strategy(
        case.strategy,
        on_torch.describe(model),
        **arguments,
        precision=fs.Precision(compute=case.compute),
        batch=fs.Batch(rows, LENGTH, case.accumulate, case.sync),
        remat=case.remat,
        prefetch=fs.Prefetch(case.prefetch, case.prefetch),
    )
    state = on_torch.shard(model, plan, fs.AdamW(lr=LR), seed=7, device=DEVICE, first_step_checks=checked(model))
    losses, norms = [], []
    for batch in data(case.steps):
        mine = _mine(batch, on_torch.data_rank(plan.mesh), plan.mesh.data, case.accumulate)
        result = on_torch.train_step(state, mine, clip=case.clip, loss=getattr(on_torch, f"{case.loss}_loss"))
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    return losses, norms, {n: p.full_tensor().detach().cpu() for n, p in state.model.named_parameters()}


def stock(kind: str, accumulate: int, steps: int):
    """The same with bare `fully_shard`, as its documentation says to use it."""
    model = build(kind)
    world, rank = dist.get_world_size(), dist.get_rank()
    options = {
        "mesh": init_device_mesh(DEVICE, (world,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    inner = model.base_model.model if kind == "lora" else model
    for layer in inner.model.layers:
        fully_shard(layer, **options)
    if kind == "tied":
        fully_shard([inner.model.embed_tokens, inner.model.norm, inner.lm_head], **options)
    else:
        fully_shard(inner.model.embed_tokens, **options)
        fully_shard([inner.model.norm, inner.lm_head], **options)
    fully_shard(model, **options)
    on_torch.initialize(model, torch.device(DEVICE), seed=7)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses = []
    for batch in data(steps):
        tokens = (batch["labels"] != -100).sum()
        total = torch.zeros((), device=DEVICE)
        for part in _mine(batch, rank, world, accumulate):
            logits = model(part["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), part["labels"].flatten(), reduction="sum")
            (loss * world / tokens).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append((total / tokens).item())
    return losses, {n: p.full_tensor().detach().cpu() for n, p in model.named_parameters()}


def distance(a: dict, b: dict) -> dict[str, float]:
    """‖a − b‖ / ‖b‖, tensor by tensor."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return {n: float((a[n].float() - b[n].float()).norm() / b[n].float().norm().clamp(min=1e-12)) for n in b}


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def parts(case: Case) -> int:
    """Micro-batches in a step, over all ranks."""
    return dist.get_world_size() // case.arguments.get("tensor", 1) * case.accumulate


_known: dict = {}


def once(function, *key):
    """What a run that depends on nothing but `key` gave: it runs once in the ranks' life."""
    if (function, key) not in _known:
        _known[function, key] = function(*key)
    return _known[function, key]


def from_first(function, *args):
    """What the first rank computes, on all ranks: it needs no others, and they would all compute the same."""
    found = [function(*args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def oracle(case: Case):
    """The unsharded run."""
    return once(from_first, unsharded, case.kind, parts(case), case.clip, case.steps)


def errors(case: Case) -> dict[str, float]:
    """How far a fullshard run is from the oracle: loss, gradient norm, worst parameter tensor."""
    losses, norms, params = sharded(case)
    want_losses, want_norms, want_params = oracle(case)
    found = distance(params, want_params)
    worst = max(found, key=found.__getitem__)
    return {"loss": relative(losses, want_losses), "norm": relative(norms, want_norms), "param": found[worst], "worst": worst}


def bf16_errors(case: Case) -> dict:
    """Distances of fullshard and of stock `fully_shard` from the fp32 oracle, both in bf16."""
    losses, _, params = sharded(case)
    stock_losses, stock_params = once(stock, case.kind, case.accumulate, case.steps)
    want_losses, _, want_params = oracle(case)
    ours, theirs = distance(params, want_params), distance(stock_params, want_params)
    return {
        "loss": relative(losses, want_losses),
        "stock_loss": relative(stock_losses, want_losses),
        "excess": max(ours[n] - theirs[n] for n in ours),
        "worst": max(ours.values()),
        "stock_worst": max(theirs.values()),
        "from_stock": max(distance(params, stock_params).values()),
    }
