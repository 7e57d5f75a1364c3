"""A loop written for Hugging Face Accelerate, with a fullshard plan: accumulation, clipping, a schedule, save_state.

torchrun --nproc-per-node=2 examples/accelerate_loop.py
python examples/accelerate_loop.py                             # one rank: the same losses
"""

import argparse
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.interop import hf_accelerate

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
        micro_batch = GLOBAL_BATCH // ranks // ACCUMULATE
        model = on_torch.load_model("llama-nano")
        batch = fs.Batch(micro_batch=micro_batch, sequence=16, accumulate=ACCUMULATE)
        plan = fs.strategy(strategy, on_torch.describe(model), devices=ranks, batch=batch)
        self.state = on_torch.shard(model, plan, fs.AdamW(lr=3e-3), seed=0)

        self.accelerator = Accelerator(cpu=device.type == "cpu", gradient_accumulation_steps=ACCUMULATE)
        self.model, self.optimizer = hf_accelerate.prepare(self.accelerator, self.state)
        ids = rows(128)
        self.data = self.accelerator.prepare(DataLoader(TensorDataset(ids), batch_size=micro_batch))  # each rank gets its part
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.accelerator.register_for_checkpointing(self.schedule)

    def train(self, steps: int) -> list[float]:
        """The mean loss of each step, over all ranks and micro-batches."""
        losses, done = [], self.state.step
        for (ids,) in islice(self.data, done * ACCUMULATE, (done + steps) * ACCUMULATE):
            with self.accelerator.accumulate(self.model):
                logits = self.model(ids[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                self.accelerator.backward(loss)  # divides by the accumulation; FSDP averages over ranks
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()  # after the last micro-batch; does nothing before
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.schedule.step()
            losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        return [sum(losses[i : i + ACCUMULATE]) / ACCUMULATE for i in range(0, len(losses), ACCUMULATE)]


def main() -> None:
    args = arguments()
    loop = Loop(args.strategy)
    losses = loop.train(args.steps)
    loop.accelerator.save_state(args.output)  # the sharded state is in its folder `fullshard`
    if on_torch.is_first():
        for index, loss in enumerate(losses, 1):
            print(f"  step {index:3}  loss {loss:.6f}")
        print(f"saved {args.output}")
    on_torch.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3", choices=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", default="runs/examples/accelerate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
