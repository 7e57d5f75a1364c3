"""Models of other kinds, trained through fullshard and with nothing but torch. Runs inside ranks."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard as fs
from fullshard import on_torch
from tests.cpu import odd_models

ROWS, STEPS, LR = 8, 4, 0.05
IGNORED = -100


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 5))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = [3, 8, 12, 12]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(width)
        )
        self.head = nn.Linear(width[-1], 5)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((-2, -1)))


class UNet(nn.Module):
    """Down, middle, up, with a skip connection over the middle, conditioned on a time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 8)
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)])
        self.middle = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        first = self.down[0](x) + self.time(t[:, None])[:, :, None, None]
        low = self.down[1](F.silu(first))
        return self.out(torch.cat([first, self.up(low + self.middle(low))], 1))


class Borrowing(nn.Module):
    """Computes logits with the weight of its embedding, as Whisper's decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return SimpleNamespace(logits=x @ self.embed.weight.T)


class Images(NamedTuple):
    pixels: Tensor
    labels: Tensor


@dataclass
class Noised:
    clean: Tensor
    noise: Tensor
    time: Tensor
    weight: Tensor  # of each row: some count for nothing
    name: str = "a batch of another kind"


def hugging_face(kind: str) -> nn.Module:
    import transformers as t

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    llama_like = small | {"vocab_size": 40, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    dry = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    deepseek = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2, "topk_group": 1}
    deepseek |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    configs: dict[str, Callable[[], Any]] = {
        "vit": lambda: t.ViTConfig(**small, **dry, image_size=8, patch_size=4, num_labels=5),
        "bert": lambda: t.BertConfig(**small, **dry, vocab_size=40, max_position_embeddings=32),
        "t5": lambda: t.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=40, dropout_rate=0.0),
        "mamba": lambda: t.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4),
        "mixtral": lambda: t.MixtralConfig(**llama_like, num_local_experts=4, num_experts_per_tok=2),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**llama_like, **experts),
        "deepseek_v3": lambda: t.DeepseekV3Config(**(llama_like | {"head_dim": 4}), **deepseek, first_k_dense_replace=1),
        "gpt_oss": lambda: t.GptOssConfig(**llama_like, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    }
    config = configs[kind]()
    if kind == "t5":
        config.decoder_start_token_id = 0
    heads = {"vit": t.AutoModelForImageClassification, "bert": t.AutoModelForMaskedLM, "t5": t.AutoModelForSeq2SeqLM}
    return heads.get(kind, t.AutoModelForCausalLM).from_config(config)


OWN = {"mlp": MLP, "cnn": ConvNet, "unet": UNet}
ODD = {"borrowing": Borrowing, **odd_models.PLAIN, **odd_models.SHOWN, **odd_models.REFUSED}
HUGGING_FACE = ("vit", "bert", "t5", "mamba", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
KINDS = (*OWN, *HUGGING_FACE)


def build(kind: str) -> nn.Module:
    with torch.device("meta"):
        return (OWN | ODD)[kind]() if kind in OWN | ODD else hugging_face(kind)


# -- batches and losses --------------------------------------------------------------------------------------


def global_batch(kind: str, step: int) -> Any:
    draw = torch.Generator().manual_seed(step)
    classes = torch.randint(0, 5, (ROWS,), generator=draw)
    pixels = torch.randn(ROWS, 3, 8, 8, generator=draw)
    ids = torch.randint(0, 40, (ROWS, 13), generator=draw)
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : row % 5] = IGNORED  # unequal rows
    match kind:
        case "mlp":
            return torch.randn(ROWS, 6, generator=draw), classes
        case "cnn":
            return Images(pixels, classes)
        case "unet":
            time, noise = torch.rand(ROWS, generator=draw), torch.randn(ROWS, 3, 8, 8, generator=draw)
            return Noised(pixels, noise, time, (torch.arange(ROWS) % 3 > 0).float())
        case "vit":
            return {"pixel_values": pixels, "labels": classes}
        case "bert":
            return {"input_ids": ids[:, :-1], "attention_mask": (labels != IGNORED).long(), "labels": labels}
        case "t5":
            return {"input_ids": ids, "labels": labels[:, :7]}
    return {"input_ids": ids[:, :-1], "labels": labels}


def loss(model: nn.Module, batch: Any) -> on_torch.Loss:
    if isinstance(batch, Noised):
        weight = batch.weight[:, None, None, None]
        noised = batch.clean + batch.time[:, None, None, None] * batch.noise
        squares = (model(noised, batch.time) - batch.noise).square() * weight
        return on_torch.Loss(squares.sum(), weight.expand_as(squares).sum())
    if isinstance(batch, tuple):
        return _classes(model(batch[0]), batch[1])
    if "pixel_values" in batch:
        return _classes(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])
    labels, inputs = batch["labels"], {k: v for k, v in batch.items() if k != "labels"}
    if "t5" in type(model).__name__.lower():
        inputs["decoder_input_ids"] = torch.where(labels == IGNORED, 0, labels).roll(1, 1)
    logits = model(**inputs).logits
    return _classes(logits.flatten(0, 1), labels.flatten())


def _classes(logits: Tensor, labels: Tensor) -> on_torch.Loss:
    counted = labels != IGNORED
    right = (logits.argmax(-1) == labels) & counted
    total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    return on_torch.Loss(total, counted.sum(), {"accuracy": right.sum(), "rows": (len(labels), 1)})


# -- with torch alone, and sharded ----------------------------------------------------------------------------


def parts(batch: Any, count: int) -> list[Any]:
    """The rows of a global batch, in as many micro-batches."""
    from fullshard.on_torch.tensors.batch_tree import rows

    size = ROWS // count
    return [rows(batch, slice(i * size, (i + 1) * size)) for i in range(count)]


def unsharded(kind: str, count: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = build(kind)
    on_torch.initialize(model, torch.device("cpu"), seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses, accuracies = [], []
    for step in range(STEPS):
        found = [loss(model, part) for part in parts(global_batch(kind, step), count)]
        counted = sum(float(f.count) for f in found)
        (sum(f.sum for f in found) / counted).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(f.sum.detach() for f in found)) / counted)
        accuracies.append(sum(float(f.metrics["accuracy"]) for f in found) / counted if found[0].metrics else 0.0)
    return losses, accuracies, {n: p.detach().clone() for n, p in model.named_parameters()}


def sharded(
    kind: str,
    strategy: str,
    accumulate: int,
    own: bool,
    small: int = 0,
    keep: str = "",
    shown: bool = False,
    home: fs.Home | None = None,
    **common: Any,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model, world = build(kind), dist.get_world_size()
    arguments = {"replicate": world, "shard": 1} if strategy == "hybrid" else {"devices": world}
    shape = fs.Batch(ROWS // (world // common.get("tensor", 1)) // accumulate, 16, accumulate)
    batch: dict[str, Any] = {"example": global_batch(kind, 0), "loss": loss, "costs": False} if shown else {}
    plan = fs.strategy(strategy, on_torch.describe(model, small=small, **batch), **arguments, batch=shape, **common)
    plan = plan.change(keep, reshard=False) if keep else plan
    if home:
        plan = plan.change("*", home=home)
    disk = tempfile.mkdtemp() if home and "disk" in (home.params, home.optimizer) else None
    state = on_torch.shard(model, plan, fs.SGD(lr=LR, momentum=0.9, decay_all=True), seed=7, disk=disk)
    losses, accuracies = [], []
    for step in range(STEPS):
        rank = on_torch.data_rank(plan.mesh)
        mine = parts(global_batch(kind, step), plan.mesh.data * accumulate)[rank * accumulate : (rank + 1) * accumulate]
        if own:
            losses.append(_own_step(state, mine, world))
            continue
        result = on_torch.train_step(state, mine, loss=loss)
        losses.append(result.loss.item())
        accuracies.append(result.metrics["accuracy"].item() if result.metrics else 0.0)
    return losses, accuracies, whole_values(state)


def whole_values(state: on_torch.State) -> dict[str, Tensor]:
    with state.values() as found:
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in found.items()}


def _own_step(state: on_torch.State, mine: list[Any], world: int) -> float:
    """A step as a caller writes it who owns the loop and knows what the batches count."""
    counts = torch.stack([torch.as_tensor(loss(state.model, b).count).double() for b in mine]).sum()
    dist.all_reduce(counts)
    total = torch.zeros((), dtype=torch.float64)
    for batch in mine:
        value = loss(state.model, batch).sum
        (value * (world / counts).float()).backward()  # FSDP averages over ranks
        total += value.detach().double()
    dist.all_reduce(total)
    state.optimizer.step()
    state.optimizer.zero_grad()
    return float(total / counts)


def compared(kind: str, strategy: str, accumulate: int = 1, own: bool = False, **common: Any) -> dict[str, float]:
    """The largest differences from one process, of losses, accuracies and weights."""
    world = dist.get_world_size()
    data = world // common.get("tensor", 1)
    want, found = unsharded(kind, data * accumulate), sharded(kind, strategy, accumulate, own, **common)
    apart = lambda a, b: max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)
    weights = max(_largest(found[2][n] - w) for n, w in want[2].items())
    moved = max(_largest(w - s) for (_, w), s in zip(sorted(want[2].items()), _start(kind), strict=True))
    return {
        "loss": apart(want[0], found[0]),
        "accuracy": 0.0 if own else apart(want[1], found[1]),
        "weights": weights,
        "moved": moved,
    }


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def statistics(directory: str) -> dict[str, Any]:
    """Running statistics of two ranks: each rank's own, those after an evaluation, and those that a checkpoint has."""
    model = build("cnn")
    plan = fs.zero3(on_torch.describe(model), devices=2, batch=fs.Batch(ROWS // 2, 1))
    state = on_torch.shard(model, plan, fs.SGD(lr=LR), seed=7)
    mine = parts(global_batch("cnn", 0), 2)[dist.get_rank()]
    on_torch.train_step(state, [mine], loss=loss)
    norm = state.model.stages[0][1]
    own = norm.running_mean.clone()
    on_torch.evaluate(state, [mine], loss=loss)
    found = norm.running_mean.clone()
    on_torch.train_step(state, [mine], loss=loss)
    fs.checkpoint.save(directory, state)
    saved, batches = norm.running_mean.clone(), int(norm.num_batches_tracked)
    norm.running_mean.zero_()
    fs.checkpoint.load(directory, state)
    return {"own": own, "found": found, "saved": saved, "loaded": norm.running_mean.clone(), "batches": batches}


def in_half_precision() -> tuple[list[float], set[torch.dtype]]:
    """Losses of a network with BatchNorm that computes in bf16, and the dtypes of weights that its norms computed with."""
    model, seen = build("cnn"), set()
    plan = fs.zero3(on_torch.describe(model), devices=2, batch=fs.Batch(ROWS // 2, 1), precision=fs.Precision(compute="bf16"))
    state = on_torch.shard(model, plan, fs.SGD(lr=LR), seed=7)
    norm, own = torch.nn.functional.batch_norm, []
    torch.nn.functional.batch_norm = lambda x, m, v, w, *more: (seen.add(w.dtype), own.append(x.dtype), norm(x, m, v, w, *more))[
        2
    ]
    try:
        for step in range(STEPS):
            mine = parts(global_batch("cnn", step), 2)[dist.get_rank()]
            own.append(on_torch.train_step(state, [mine], loss=loss).loss.item())
    finally:
        torch.nn.functional.batch_norm = norm
    assert torch.bfloat16 in own
    return [x for x in own if isinstance(x, float)], seen


def refused(kind: str, split: dict[str, str]) -> str:
    model = build(kind)
    plan = fs.zero3(on_torch.describe(model), devices=2, tensor=2, split=split)
    try:
        on_torch.shard(model, plan)
    except fs.FullshardError as error:
        return str(error)
    return "sharded"


def refusal(kind: str, own: bool, **common: Any) -> str:
    """What training says of a model that it cannot compute."""
    try:
        sharded(kind, "zero3", 1, own, **common)
    except fs.FullshardError as error:
        return str(error)
    return "trained"


def _start(kind: str) -> list[Tensor]:
    model = build(kind)
    on_torch.initialize(model, torch.device("cpu"), seed=7)
    return [p.detach() for _, p in sorted(model.named_parameters())]


def resumed(kind: str, home: fs.Home, directory: str) -> tuple[list[float], list[float]]:
    """Losses of a training's last two steps: uninterrupted, and from a checkpoint after its second step with `home`."""

    def start(its: fs.Home) -> on_torch.State:
        model = build(kind)
        plan = fs.zero3(on_torch.describe(model), devices=dist.get_world_size(), batch=fs.Batch(ROWS // 2, 16), home=its)
        disk = tempfile.mkdtemp() if its.optimizer == "disk" else None
        return on_torch.shard(model, plan, fs.AdamW(lr=LR), seed=7, disk=disk)

    def steps(state: on_torch.State, which: range) -> list[float]:
        rank = on_torch.data_rank(state.plan.mesh)
        mine = [parts(global_batch(kind, step), state.plan.mesh.data)[rank] for step in which]
        return [on_torch.train_step(state, [batch], loss=loss).loss.item() for batch in mine]

    first = start(home)
    steps(first, range(2))
    fs.checkpoint.save(directory, first)
    again = start(fs.Home() if home.params == "disk" else home)
    fs.checkpoint.load(directory, again)
    return steps(first, range(2, 4)), steps(again, range(2, 4))
