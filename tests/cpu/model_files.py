"""Model files as other people write them, and what fullshard makes of them. Its functions run inside ranks."""

import hashlib
import io
import math
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard as fs
from fullshard import FullshardError, on_torch
from fullshard.runs.prepare.prepare import prepare
from fullshard.runs.recipe.recipe import load_recipe
from fullshard.runs.run import execute

VOCAB, LENGTH, ROWS, STEPS, LR, SEED = 256, 16, 8, 4, 0.1, 11


class Norm(nn.Module):
    """Without a reset_parameters."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.up, self.proj = Norm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.proj(F.gelu(self.up(self.norm(mixed))))


class Tiny(nn.Module):
    """nanoGPT's ways: tied weights, a scaled initialisation in __init__, a loss of its own, only the last position without."""

    def __init__(self, layers: int = 3, dim: int = 12):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, dim), nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.lm_head = Norm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.embed.weight = self.lm_head.weight
        self.register_buffer("waves", torch.sin(torch.outer(torch.arange(LENGTH), torch.arange(1, dim + 1))), persistent=False)
        self.turns = torch.polar(torch.ones(LENGTH), torch.arange(float(LENGTH)))  # a plain attribute, as Llama's freqs_cis
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers))
        print("a model that talks")

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def hidden(self, idx: Tensor) -> Tensor:
        x = self.embed(idx) + self.waves[: idx.shape[1]] * self.turns.real[: idx.shape[1], None]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Reading(Tiny):
    """Reads a value of a tensor while it is built, which a meta tensor does not have."""

    def __init__(self) -> None:
        super().__init__(layers=int(torch.linspace(1, 2, 2)[-1].item()))


class Late(Tiny):
    """Has a rule that building it does not call."""

    def apply(self, function: Callable[[nn.Module], Any]) -> "Late":
        return self


class Forgetful(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.norm.bias = nn.Parameter(torch.empty(12))


class Huge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(1 << 20, 1 << 20)) for _ in range(2))


class Flat(Tiny):
    """The loss first, and logits without rows."""

    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        logits = self.lm_head(self.hidden(x))
        rows, tokens, vocabulary = logits.shape
        logits = logits.view(rows * tokens, vocabulary)
        return F.cross_entropy(logits, y.view(rows * tokens)), logits


class Named(Tiny):
    def forward(self, tokens: Tensor, start_pos: int) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.hidden(tokens)
        return {"hidden": x, "logits": self.lm_head(x)}


class Plain(Tiny):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.lm_head(self.hidden(x))


class Capped(Plain):
    """Gives its logits a shape, which a sum does not have."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).view(*x.shape, VOCAB)


class Recurrent(nn.Module):
    """Time first, and a state besides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.decoder = nn.Embedding(VOCAB, 12), nn.LSTM(12, 12, 2), nn.Linear(12, VOCAB)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, tokens_TB: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        output, state = self.rnn(self.embed(tokens_TB), state)
        return F.log_softmax(self.decoder(output).view(-1, VOCAB), -1), state


def call_recurrent(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    state = tuple(torch.zeros(2, len(ids), 12, device=ids.device) for _ in range(2))
    return model(ids.t(), state)[0].view(*ids.t().shape, VOCAB).transpose(0, 1)


def call_loss(model: nn.Module, batch: dict[str, Tensor]) -> on_torch.Loss:
    logp = call_recurrent(model, batch)
    total = F.nll_loss(logp.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return on_torch.Loss(total, batch["labels"].numel(), {"bits": total.detach() / math.log(2)})


def call_and_count(model: nn.Module, batch: dict[str, Tensor]) -> on_torch.Loss:
    total = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return on_torch.Loss(total, batch["labels"].numel())


FILE = str(Path(__file__))
KINDS: dict[str, Callable[[], nn.Module]] = {
    "Tiny": Tiny,
    "Reading": Reading,
    "Late": Late,
    "Flat": Flat,
    "Named": Named,
    "Plain": Plain,
    "Recurrent": Recurrent,
}


def built(kind: str) -> nn.Module:
    """What the factory gives in one process: the oracle."""
    torch.manual_seed(SEED)
    return KINDS[kind]()


# -- initial values ------------------------------------------------------------------------------------------


def digests(model: nn.Module) -> dict[str, str]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors |= {n: t for n, t in vars(model).items() if isinstance(t, Tensor)}
    whole = {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().contiguous() for n, t in tensors.items()}
    return {n: hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in whole.items()}


def own_digests(kind: str) -> dict[str, str]:
    return digests(built(kind))


def sharded_digests(kind: str, strategy: str, init: str = "load") -> tuple[dict[str, str], tuple[str, ...]]:
    if init == "load":
        model, given = on_torch.load_model(f"{FILE}:{kind}"), None
    else:
        with torch.device("meta"):
            model, given = KINDS[kind](), on_torch.Factory(KINDS[kind])
    plan = fs.strategy(strategy, on_torch.describe(model), devices=dist.get_world_size())
    state = on_torch.shard(model, plan, seed=SEED, init=given)
    return digests(state.model), state.notes


def refused(kind: str, init: str = "factory") -> str:
    model = on_torch.load_model(f"{FILE}:{kind}", init=init)
    try:
        on_torch.shard(model, fs.zero3(on_torch.describe(model), devices=dist.get_world_size()))
    except FullshardError as error:
        return str(error)
    return "no error"


# -- training ------------------------------------------------------------------------------------------------


def global_batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : row % 5] = -100  # unequal rows
    return {"input_ids": ids[:, :-1], "labels": labels}


def all_logits(kind: str, model: nn.Module, ids: Tensor) -> Tensor:
    """The logits of all positions, from the parts of the model."""
    if kind == "Recurrent":
        return call_recurrent(model, {"input_ids": ids})
    return model.lm_head(model.hidden(ids))  # type: ignore[operator]


def by_hand(kind: str) -> tuple[list[float], list[int]]:
    """The losses of plain torch, and the tokens that the trained model continues a prompt with."""
    model = built(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    for step in range(STEPS):
        batch = global_batch(step)
        loss = F.cross_entropy(all_logits(kind, model, batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tokens = [1, 2, 3]
    for _ in range(4):
        tokens.append(int(all_logits(kind, model, torch.tensor([tokens]))[0, -1].argmax()))
    return losses, tokens


LOSSES = {"plain": on_torch.summed_loss, "chunked": on_torch.chunked_loss, "call": on_torch.called_loss}


def trained(kind: str, loss: str, strategy: str = "zero3") -> tuple[list[float], list[int], float]:
    model = on_torch.load_model(f"{FILE}:{kind}", call=f"{FILE}:call_recurrent" if loss == "call" else None)
    world, rank = dist.get_world_size(), dist.get_rank()
    plan = fs.strategy(strategy, on_torch.describe(model), devices=world, batch=fs.Batch(ROWS // world, LENGTH))
    state = on_torch.shard(model, plan, fs.SGD(lr=LR, momentum=0.9, decay_all=True, weight_decay=0.0), seed=SEED)
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    mine = lambda step: {k: v[rows] for k, v in global_batch(step).items()}
    losses = [on_torch.train_step(state, [mine(s)], loss=LOSSES[loss]).loss.item() for s in range(STEPS)]
    tokens = on_torch.generate(state.model, [1, 2, 3], max_new_tokens=4, temperature=0)
    return losses, tokens, on_torch.evaluate(state, [mine(0)], loss=LOSSES[loss])["loss"]


def run(directory: str, overrides: list[str], name: str, resume: str | None = None) -> str:
    """As `fullshard train`. Returns what it prints to stderr."""
    os.chdir(directory)
    with redirect_stderr(io.StringIO()) as said:
        prepared = prepare(load_recipe("recipe.toml", overrides), dist.get_world_size())
        execute(prepared, Path("runs") / name, resume, accept=True)
    return said.getvalue()
