"""The basics: describe a plain model, make a plan, shard, train, and compare with the unsharded model.

torchrun --nproc-per-node=2 examples/basics.py
torchrun --nproc-per-node=2 examples/basics.py --strategy ddp
python examples/basics.py                       # one rank, the same code
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard as fs
from fullshard import on_torch
from fullshard.base.text import bytes_text, table

VOCAB, SEED, LR = 64, 0, 1e-3


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A plain module without any sharding: token ids in, logits out."""

    def __init__(self, dim: int, layers: int):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x = self.embed(ids_BT)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step: int, rank: int, rows: int, length: int = 32) -> dict[str, Tensor]:
    """Rows in which token t is followed by one of 5·t … 5·t + 3 (mod 64). The best possible loss is log 4 = 1.386."""
    noise_BT = torch.randint(0, 4, (rows, length + 1), generator=torch.Generator().manual_seed(1000 * step + rank))
    ids = [16 * noise_BT[:, 0]]
    for t in range(1, length + 1):
        ids.append((5 * ids[-1] + noise_BT[:, t]) % VOCAB)
    ids_BT = torch.stack(ids, dim=1)
    return {"input_ids": ids_BT[:, :-1], "labels": ids_BT[:, 1:]}


def main() -> None:
    args = arguments()
    device = on_torch.start()  # joins the ranks that torchrun started, or starts alone
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):  # shapes only, no memory
        model = Net(args.dim, args.layers)

    # The plan says which modules gather together and where their bytes are kept. It can be printed and stored.
    description = on_torch.describe(model)
    plan = fs.strategy(args.strategy, description, devices=ranks, batch=fs.Batch(micro_batch=args.rows, sequence=32))
    say(f"{description}\n\n{plan}\n")

    # Every rank calls shard. Weights are initialised from the seed, shard by shard.
    state = on_torch.shard(model, plan, optimizer=fs.AdamW(lr=LR), seed=SEED)
    say(f"training on {ranks} rank{'s'[: ranks > 1]}, {device.type}")
    for step in fs.train(state, ([batch(s, rank, args.rows)] for s in range(args.steps)), steps=args.steps):
        loss = step.loss.item()  # the mean over the tokens of all ranks
        if step.index in (1, args.steps) or step.index % 10 == 0:
            say(f"  step {step.index:3}  loss {loss:.6f}")

    unsharded_loss, unsharded_bytes = train_unsharded(args, device, ranks)
    rank_bytes = state.held_bytes()
    rows = [[kind, bytes_text(unsharded_bytes[kind]), bytes_text(rank_bytes[kind])] for kind in ("params", "optimizer")]
    say(f"\n{table(['between steps', 'unsharded', f'a rank of {ranks}'], rows, right=(1, 2))}\n")
    say(f"last loss, {args.strategy} over {ranks} rank{'s'[: ranks > 1]}: {loss:.6f}")
    say(f"last loss, unsharded: {unsharded_loss:.6f}")
    on_torch.finish()


def train_unsharded(args: argparse.Namespace, device: torch.device, ranks: int) -> tuple[float, dict[str, int]]:
    """Train the same model in plain torch, from the same weights, on the batches of all ranks. Returns the last loss, and
    the bytes of parameters and optimizer."""
    with torch.device("meta"):
        model = Net(args.dim, args.layers)
    on_torch.initialize(model, device, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for step in range(args.steps):
        parts = [batch(step, rank, args.rows) for rank in range(ranks)]
        ids_BT, labels_BT = (torch.cat([p[key] for p in parts]).to(device) for key in ("input_ids", "labels"))
        loss = F.cross_entropy(model(ids_BT).flatten(0, 1), labels_BT.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [t for slot in optimizer.state.values() for t in slot.values() if t.ndim > 0]
    return loss.item(), {"params": sum(p.nbytes for p in model.parameters()), "optimizer": sum(t.nbytes for t in moments)}


def say(text: str) -> None:
    if on_torch.is_first():
        print(text, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3", choices=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="rows per rank and step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
