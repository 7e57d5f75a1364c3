"""A loop written for Lightning Fabric, with a fullshard plan: setup, accumulation, clipping, save and load.

torchrun --nproc-per-node=2 examples/fabric_loop.py
python examples/fabric_loop.py                                 # one rank: the same losses
"""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.interop.fabric import ShardedStrategy

GLOBAL_BATCH, ACCUMULATE = 8, 2


def rows(count: int) -> torch.Tensor:
    """Rows of 17 tokens that count upwards, each in its own steps."""
    starts, strides = torch.randint(0, 64, (2, count, 1), generator=torch.Generator().manual_seed(0))
    return (starts + strides % 3 * torch.arange(17)) % 64


class Loop:
    """The model, its optimizer and the data, ready for steps."""

    def __init__(self, strategy: str = "zero3"):
        device = on_torch.start()
        ranks = dist.get_world_size()
        model = on_torch.load_model("llama-nano")
        batch = fs.Batch(micro_batch=GLOBAL_BATCH // ranks // ACCUMULATE, sequence=16, accumulate=ACCUMULATE)
        plan = fs.strategy(strategy, on_torch.describe(model), devices=ranks, batch=batch)

        self.strategy = ShardedStrategy(plan, fs.AdamW(lr=3e-3), seed=0)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.fabric = Fabric(accelerator=device.type, devices=here, num_nodes=ranks // here, strategy=self.strategy)
        self.fabric.launch()
        self.model = self.fabric.setup_module(model)  # carries the plan out
        self.optimizer = self.fabric.setup_optimizers(self.strategy.sharded.optimizer)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        ids = rows(128)
        self.data = self.fabric.setup_dataloaders(DataLoader(TensorDataset(ids), batch_size=batch.micro_batch))

    def train(self, steps: int) -> list[float]:
        """The mean loss of each step, over all ranks and micro-batches."""
        losses, done = [], self.strategy.sharded.step
        found = islice(self.data, done * ACCUMULATE, (done + steps) * ACCUMULATE)
        for i, (ids,) in enumerate(found, 1):
            last = i % ACCUMULATE == 0
            with self.fabric.no_backward_sync(self.model, enabled=not last):
                loss = F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                self.fabric.backward(loss / ACCUMULATE)  # FSDP averages over ranks
            losses.append(self.fabric.all_reduce(loss.detach(), reduce_op="mean").item())
            if last:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
        return [sum(losses[i : i + ACCUMULATE]) / ACCUMULATE for i in range(0, len(losses), ACCUMULATE)]


def main() -> None:
    args = arguments()
    loop = Loop(args.strategy)
    losses = loop.train(args.steps)
    objects = {"model": loop.model, "optimizer": loop.optimizer, "schedule": loop.schedule, "losses": losses}
    loop.fabric.save(args.output, objects)  # verified, and readable on any number of ranks
    if on_torch.is_first():
        for index, loss in enumerate(losses, 1):
            print(f"  step {index:3}  loss {loss:.6f}")
        print(f"saved {args.output}")
    on_torch.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3", choices=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", default="runs/examples/fabric")
    return parser.parse_args()


if __name__ == "__main__":
    main()
