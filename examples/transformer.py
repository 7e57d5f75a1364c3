"""A transformer from scratch, sharded from outside: the model's code has no sharding in it.

    torchrun --nproc-per-node=2 examples/transformer.py                               # 32 million parameters, 4 steps
    torchrun --nproc-per-node=2 examples/transformer.py --layers 4 --dim 64 --heads 4 --steps 100 --lr 3e-3
    torchrun --nproc-per-node=8 examples/transformer.py --bf16 --prefetch 2 --remat --steps 300        # GPUs

It learns Python byte by byte from the sources of the standard library's asyncio, and is evaluated on those of json.
"""

import argparse
import asyncio
import itertools
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard as fs
from fullshard import on_torch
from fullshard.data import Batches, TokenFile
from fullshard.data.pack_tokens import pack


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (w(x_BTD).view(B, T, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out_BHTd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out_BHTd.transpose(1, 2).reshape(B, T, D))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.ffn_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return h_BTD + self.feed_forward(self.ffn_norm(h_BTD))


class Transformer(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, vocab: int, sequence: int):
        super().__init__()
        self.tok_embeddings, self.pos_embeddings = nn.Embedding(vocab, dim), nn.Embedding(sequence, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        h_BTD = self.tok_embeddings(tokens_BT) + self.pos_embeddings(positions_T)
        for layer in self.layers:
            h_BTD = layer(h_BTD)
        return self.output(self.norm(h_BTD))

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module. Without this method, each module's own `reset_parameters` is called."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def main() -> None:
    args = arguments()
    device = on_torch.start()
    with torch.device("meta"):
        model = Transformer(args.layers, args.dim, args.heads, vocab=256, sequence=args.sequence)

    description = on_torch.describe(model, classes=["TransformerBlock"])  # each block is a unit
    plan = fs.zero3(
        description,
        devices=dist.get_world_size(),
        batch=fs.Batch(args.micro_batch, args.sequence, args.accumulate),
        precision=fs.Precision(compute="bf16" if args.bf16 else "fp32", reduce="fp32"),
        prefetch=fs.Prefetch(forward=args.prefetch, backward=args.prefetch),
        remat="full" if args.remat else "none",
    )
    say(f"{description}\n\n{plan}\n\ntraining on {device.type}")
    state = on_torch.shard(model, plan, optimizer=fs.AdamW(lr=args.lr, weight_decay=0.1, decay_all=False), seed=0)

    for step in fs.train(state, batches(asyncio, plan), steps=args.steps, clip=1.0):
        loss, norm = step.loss.item(), step.grad_norm.item()  # waits for the device, so all ranks do it
        if step.index == 1 or step.index % max(1, args.steps // 10) == 0:
            say(f"  step {step.index:4}  loss {loss:.4f}  gradient norm {norm:.3f}  {int(step.count)} tokens")

    held_out = itertools.chain.from_iterable(itertools.islice(batches(json, plan), 2))
    say(f"loss on text it has not seen: {on_torch.evaluate(state, held_out)['loss']:.4f}")
    sample = on_torch.generate(
        state.model, list(b"def "), max_new_tokens=args.sample, temperature=0.5, stop=0, window=args.sequence
    )
    say(f"it continues 'def ': {bytes(sample).decode(errors='replace')!r}")
    on_torch.finish()


def batches(package, plan: fs.Plan) -> Batches:
    """This rank's micro-batches from the sources of a Python package. Rank 0 packs them once."""
    path = Path("runs/examples") / package.__name__
    if on_torch.is_first() and not path.exists():
        pack([Path(package.__file__).parent], path, workers=1)
    dist.barrier()
    shape = plan.batch
    rank, ranks = on_torch.data_rank(plan.mesh), plan.mesh.data
    return Batches(TokenFile(path), shape.sequence, shape.micro_batch, shape.accumulate, rank=rank, ranks=ranks)


def say(text: str) -> None:
    if on_torch.is_first():
        print(text, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 10, "dim": 512, "heads": 8, "sequence": 64, "steps": 4, "sample": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; the master weights stay fp32")
    parser.add_argument("--prefetch", type=int, default=1, help="units gathered ahead")
    parser.add_argument("--remat", action="store_true", help="recompute activations in backward")
    return parser.parse_args()


if __name__ == "__main__":
    main()
