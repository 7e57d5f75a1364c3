"""Training in float8 inside ranks, emulated on CPUs, and the oracle: an unsharded model that torchao converted."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map_only
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import fullshard as fs
from fullshard import on_torch
from fullshard.data import Batches, TokenFile
from fullshard.model.presets import LlamaSize
from fullshard.on_torch.model.built_in import Llama
from fullshard.planner.wire_bytes import sent_bytes, wire_bytes

SIZE = LlamaSize(dim=32, layers=2, heads=2, kv_heads=1, ffn=48, vocab=64, sequence=64)
ROWS, LENGTH, STEPS, LR = 4, 16, 5, 1e-2


def build() -> torch.nn.Module:
    with torch.device("meta"):
        return Llama(SIZE)


def data(steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """The global batch of each step."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SIZE.vocab, (steps, ROWS, LENGTH + 1), generator=draw)
    return [{"input_ids": i[:, :-1], "labels": i[:, 1:]} for i in ids]


def unsharded(kind: str, parts: int) -> list[float]:
    """The oracle's losses: torchao's layers in bf16, fp32 masters, torch's AdamW. Each part of a batch has scales of its own, as
    each rank's has."""
    model = build()
    on_torch.initialize(model, torch.device("cpu"), seed=7)
    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(kind), emulate=True)
    convert_to_float8_training(model.model.layers, config=config)
    model.bfloat16()
    for block in model.model.layers:  # FSDP casts inputs of units, such as the rotary tables
        block.register_forward_pre_hook(_to_bf16, with_kwargs=True)
    losses = []
    for batch in data():
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        total = 0.0
        for ids, labels in zip(batch["input_ids"].chunk(parts), batch["labels"].chunk(parts), strict=True):
            loss = F.cross_entropy(model(ids).float().flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()
            loss.backward()
            total += loss.item() / parts
            for p, master in zip(model.parameters(), masters, strict=True):
                master.grad = p.grad.float() / parts + (0 if master.grad is None else master.grad)
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _to_bf16(module, args, kwargs):
    return tree_map_only(torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, (args, kwargs))


def shard(strategy: str, kind: str | None, lr: float = LR, compute: str = "bf16", **more):
    """A state of the small model."""
    model, world = build(), dist.get_world_size()
    plan = fs.strategy(
        strategy,
        on_torch.describe(model),
        **({"devices": world} if strategy != "hybrid" else {}),
        precision=fs.Precision(compute, float8=kind),
        **{"batch": fs.Batch(ROWS // world, LENGTH), **more},
    )
    return on_torch.shard(model, plan, fs.AdamW(lr=lr), seed=7, device="cpu")


def train(state, steps: list[dict[str, torch.Tensor]]) -> list[float]:
    world, rank, parts = state.plan.mesh.data, dist.get_rank(), state.plan.batch.accumulate
    losses = []
    for batch in steps:
        own = {k: v.chunk(world)[rank] for k, v in batch.items()}
        micro = [{k: v.chunk(parts)[i] for k, v in own.items()} for i in range(parts)]
        losses.append(float(on_torch.train_step(state, micro).loss))
    return losses


def sharded(strategy: str, kind: str | None, **more) -> list[float]:
    """The same through fullshard."""
    return train(shard(strategy, kind, **more), data())


def compiled(kind: str) -> tuple[list[float], int, int, str]:
    """The losses with compiled blocks, graphs compiled after two steps, graph breaks, and the type of a gathered weight."""
    torch._dynamo.reset()
    counters.clear()
    state = shard("zero3", kind, compile=True)
    losses = train(state, data()[:2])
    before = counters["stats"]["unique_graphs"]
    losses += train(state, data()[2:])
    block = state.model.model.layers[1]
    block.unshard()
    gathered = type(block.mlp.up_proj.weight).__name__
    block.reshard()
    return losses, counters["stats"]["unique_graphs"] - before, sum(counters["graph_break"].values()), gathered


def weights_and_next(state) -> tuple[dict[str, tuple], list[float]]:
    """Every whole parameter (its type, dtype and values), and the losses of the next steps."""
    found = {}
    for name, p in state.model.named_parameters():
        assert type(p.to_local()) is torch.Tensor, name
        found[name] = (p.dtype, p.full_tensor().detach().clone())
    return found, train(state, data()[3:])


def saved(folder: str, strategy: str, kind: str | None) -> tuple:
    state = shard(strategy, kind)
    train(state, data()[:3])
    fs.checkpoint.save(folder, state)
    return weights_and_next(state)


def loaded(folder: str, strategy: str, kind: str | None) -> tuple:
    state = shard(strategy, kind)
    train(state, data()[:1])  # so that its own scales are not those of the checkpoint
    fs.checkpoint.load(folder, state)
    return weights_and_next(state)


def own_loop(kind: str) -> list[float]:
    """The losses of a loop that steps the optimizer itself."""
    state, losses = shard("zero3", kind), []
    for batch in data():
        own = {k: v.chunk(dist.get_world_size())[dist.get_rank()] for k, v in batch.items()}
        loss = on_torch.summed_loss(state.model, own)
        (loss * on_torch.loss_factor(state, [own["labels"].numel()])).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        dist.all_reduce(loss.data)
        losses.append(float(loss) / batch["labels"].numel())
    return losses


def sent(strategy: str, kind: str | None, **more) -> dict[str, dict[str, float]]:
    """Bytes that this rank sends in a steady step: counted, and predicted."""
    state = shard(strategy, kind, **more)
    train(state, data()[:1])
    with on_torch.record() as traffic:
        train(state, data()[1:2])
    counted = dict.fromkeys(("gather", "reduce", "all_reduce"), 0.0)
    for c in traffic.collectives:
        counted[c.kind] += sent_bytes(c.kind, c.nbytes, c.ranks)
    described = on_torch.describe(build(), micro_batch=1, sequence=LENGTH)
    found = wire_bytes(state.plan, described, loss="plain", clip=False)
    predicted = {"gather": found.gather, "reduce": found.reduce, "all_reduce": found.copies + found.agree}
    scales = [c.nbytes for c in traffic.collectives if c.kind == "all_reduce" and c.dtype is torch.float32]
    return {"counted": counted, "predicted": predicted, "scales": scales}


def learned(kind: str | None, steps: int, compute: str = "bf16") -> list[float]:
    """Mean losses of every ten steps, on tokens each of which has four likely successors: at best ln 4.

    The rate is one at which rounding alone does not part two runs: at 1e-2, fp32 and bf16 come to differ by 4%."""
    draw = torch.Generator().manual_seed(3)
    after = torch.randint(0, SIZE.vocab, (SIZE.vocab, 4), generator=draw)
    state, found = shard("zero3", kind, lr=3e-3, compute=compute), []
    for _ in range(steps):
        ids = [torch.randint(0, SIZE.vocab, (ROWS,), generator=draw)]
        for _ in range(LENGTH):
            ids.append(after[ids[-1], torch.randint(0, 4, (ROWS,), generator=draw)])
        tokens = torch.stack(ids, 1)
        found += train(state, [{"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}])
    return [sum(found[i : i + 10]) / 10 for i in range(0, steps, 10)]


def bytes_losses(tokens: str, kind: str | None, steps: int) -> list[float]:
    """Mean losses of every ten steps of the demo's model on bytes; in fp32 without `kind`. A CPU without bf16 would take 20 s for
    a step in it, and small models show that bf16 parts from fp32 by less than 0.2%."""
    world = dist.get_world_size()
    model, precision = on_torch.load_model("llama-bytes"), fs.Precision("bf16" if kind else "fp32", float8=kind)
    plan = fs.zero3(on_torch.describe(model), devices=world, batch=fs.Batch(1, 64), precision=precision)
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), seed=0, device="cpu")
    feed = Batches(TokenFile(Path(tokens)), 64, 1, rank=on_torch.data_rank(plan.mesh), ranks=world, seed=0)
    rate = lambda i: 1e-3 * min(1.0, (i + 1) / 20)
    found = [step.loss.item() for step in fs.train(state, feed, steps=steps, clip=1.0, lr=rate)]
    return [sum(found[i : i + 10]) / 10 for i in range(0, steps, 10)]
