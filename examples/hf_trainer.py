"""Hugging Face's Trainer with a fullshard plan: its data, loss, schedule, clipping, evaluation, checkpoints and resuming.

torchrun --nproc-per-node=2 examples/hf_trainer.py
torchrun --nproc-per-node=2 examples/hf_trainer.py --resume    # from the newest checkpoint
python examples/hf_trainer.py                                  # one rank: the same losses
"""

import argparse

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.interop.hf_trainer import ShardedTrainer

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, max_position_embeddings=64
)
GLOBAL_BATCH, ACCUMULATE = 8, 2
ADAMW, HERE = fs.AdamW(lr=1e-2), fs.Home()


def samples(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Rows of 32 tokens that count upwards, each in its own steps. Fewer labels count in some than in others."""
    starts, strides = torch.randint(0, 64, (2, count, 1), generator=torch.Generator().manual_seed(seed))
    ids = ((starts + strides % 3 * torch.arange(32)) % 64).tolist()
    return [{"input_ids": row, "labels": [-100] * (i % 7) + row[i % 7 :]} for i, row in enumerate(ids)]


def make_trainer(steps: int, output: str, optimizer: fs.AdamW | None = ADAMW, home: fs.Home = HERE) -> ShardedTrainer:
    """`optimizer`: None for the one that TrainingArguments name."""
    on_torch.start()
    ranks = dist.get_world_size()
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    batch = fs.Batch(micro_batch=GLOBAL_BATCH // ranks // ACCUMULATE, sequence=32, accumulate=ACCUMULATE)
    plan = fs.zero3(on_torch.describe(model), devices=ranks, batch=batch, home=home)
    state = on_torch.shard(model, plan, optimizer, seed=0)

    args = TrainingArguments(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=batch.micro_batch,  # as in the plan; another number is refused
        per_device_eval_batch_size=batch.micro_batch,
        gradient_accumulation_steps=batch.accumulate,
        learning_rate=ADAMW.lr,  # as of the state's optimizer
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=2,
        use_cpu=state.device.type == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    return ShardedTrainer(state, args, train_dataset=samples(64), eval_dataset=samples(16, seed=1))


def main() -> None:
    args = arguments()
    trainer = make_trainer(args.steps, args.output)
    trainer.train(resume_from_checkpoint=args.resume)
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{args.output}/model")  # for from_pretrained
    if on_torch.is_first():
        for entry in losses:
            print(f"  step {entry['step']:3}  loss {entry['loss']:.6f}  gradient norm {entry['grad_norm']:.6f}")
        print(f"not seen: {evaluated:.6f}; saved {args.output}/model")
    on_torch.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", default="runs/examples/hf_trainer")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
