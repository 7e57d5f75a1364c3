"""The model that cases train: small, with parts that cases turn on."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, ROWS, DIM, FFN, BLOCKS = 16, 5, 16, 16, 48, 3


@dataclass(frozen=True)
class Shape:
    """`frozen`: parameters whose name contains it are not trained. `counts`: blocks count their training forwards in a buffer."""

    batch_norm: bool = False
    tied: bool = False
    counts: bool = False
    masked: bool = False
    frozen: str | None = None

    def __str__(self) -> str:
        return ", ".join([n for n in ("batch_norm", "tied", "counts", "masked") if getattr(self, n)] + [f"frozen={self.frozen}"])


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up_proj = nn.Linear(DIM, FFN)
        self.down_proj = nn.Linear(FFN, DIM, bias=False)  # with a bias before BatchNorm, a gradient would be nothing but rounding
        self.batch_norm = nn.BatchNorm1d(DIM) if shape.batch_norm else None
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64) if shape.counts else None)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.forwards is not None and self.training:
            self.forwards += 1
        out = self.down_proj(nn.functional.gelu(self.up_proj(self.norm(x_BTD))))
        if self.batch_norm is not None:
            out = self.batch_norm(out.flatten(0, 1)).view_as(out)
        return x_BTD + out


class Toy(nn.Module):
    """`idle`: the blocks that forwards leave out."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.idle: tuple[int, ...] = ()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for i, block in enumerate(self.blocks):
            if i not in self.idle:
                x = block(x)
        return self.lm_head(self.norm(x))


def build(shape: Shape, seed: int) -> Toy:
    """The same values in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Toy(shape)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.randn_like(p) * 0.3 + (name.endswith("norm.weight")))
    for name, p in model.named_parameters():
        p.requires_grad_(shape.frozen is None or shape.frozen not in name)
    return model


def global_batch(shape: Shape, index: int) -> dict[str, Tensor]:
    """The rows of all ranks and micro-batches. `masked`: labels are missing unevenly."""
    draw = torch.Generator().manual_seed(index)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=draw)
    labels = ids[:, 1:].clone()
    for row in range(ROWS if shape.masked else 0):
        labels[row, : (row + index) % 5] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def part(batch: dict[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
    size = ROWS // parts
    return {k: v[index * size : (index + 1) * size] for k, v in batch.items()}
