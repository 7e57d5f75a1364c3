"""Save a run, and resume it: on the same ranks, on another number of them, or under another strategy.

    torchrun --nproc-per-node=2 examples/checkpointing.py --save runs/examples/checkpoint
    torchrun --nproc-per-node=2 examples/checkpointing.py --resume runs/examples/checkpoint
    python examples/checkpointing.py --resume runs/examples/checkpoint --strategy ddp       # one rank

Each rank writes its own shards. On loading, it reads only the parts of the files that its new shards need; nothing is
gathered. A checkpoint is either complete and verified or invisible. --save goes on training after the save and records
the losses of that uninterrupted run. --resume compares its own losses with them.

    fullshard checkpoint ls runs/examples/checkpoint
    fullshard checkpoint show runs/examples/checkpoint
"""

import argparse
import asyncio
import json
from pathlib import Path

import torch
import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.checkpoint.other_formats.export import export as export_checkpoint
from fullshard.data import Batches, TokenFile
from fullshard.data.pack_tokens import pack
from fullshard.model.presets import LlamaSize
from fullshard.on_torch.model.built_in import Llama

SIZE = LlamaSize(dim=64, layers=3, heads=4, kv_heads=2, ffn=128, vocab=256, sequence=64)
GLOBAL_BATCH = 8  # rows over all ranks, the same at every number of ranks, so that the steps are the same


def main() -> None:
    args = arguments()
    on_torch.start()
    state = make_state(args.strategy)
    if args.resume:
        load(state, args.resume)
        losses = train(state, args.steps - state.step)
        compare(args.resume, losses)
    else:
        train(state, args.steps // 2)
        save(state, args.save)
        losses = train(state, args.steps - state.step)
        if on_torch.is_first():
            (args.save / "losses.json").write_text(json.dumps(losses))
        export(state, args.save / "end", args.save / "model.pt")
    on_torch.finish()


def make_state(strategy: str) -> on_torch.State:
    ranks = dist.get_world_size()
    if GLOBAL_BATCH % ranks:
        raise SystemExit(f"{ranks} ranks cannot share {GLOBAL_BATCH} rows evenly; start 1, 2, 4 or 8")
    with torch.device("meta"):
        model = Llama(SIZE)
    plan = fs.strategy(strategy, on_torch.describe(model), devices=ranks, batch=fs.Batch(GLOBAL_BATCH // ranks, SIZE.sequence))
    return on_torch.shard(model, plan, optimizer=fs.AdamW(lr=3e-3, weight_decay=0.1, decay_all=False), seed=0)


def train(state: on_torch.State, steps: int) -> dict[str, float]:
    """Train for `steps` steps; return the losses by step."""
    path = Path("runs/examples/asyncio")
    if on_torch.is_first() and not path.exists():
        pack([Path(asyncio.__file__).parent], path, workers=1)
    dist.barrier()
    rank, mesh = on_torch.data_rank(state.plan.mesh), state.plan.mesh
    shape = state.plan.batch
    # The position in the data is one number: how many samples all ranks have taken.
    batches = Batches(
        TokenFile(path), shape.sequence, shape.micro_batch, rank=rank, ranks=mesh.data, cursor=state.step * GLOBAL_BATCH
    )
    losses = {str(step.index): step.loss.item() for step in fs.train(state, batches, steps=steps, clip=1.0)}
    for index, loss in losses.items():
        say(f"  step {index:>2}  loss {loss:.6f}")
    return losses


def save(state: on_torch.State, where: Path) -> None:
    """Every rank writes its own shards. The checkpoint becomes visible when all of them are on disk. Collective."""
    made = fs.checkpoint.save(where, state, cursor=state.step * GLOBAL_BATCH)
    say(f"saved step {state.step} to {made}, each rank its own shards; the run goes on")


def load(state: on_torch.State, where: Path) -> None:
    """Every rank reads the values of its own shards into the state. Collective."""
    try:
        manifest = fs.checkpoint.load(where, state)
    except fs.FullshardError as error:
        raise SystemExit(f"{error}; make one with --save {where}") from None
    say(f"resumed at step {state.step} from {where}")
    for difference in fs.Plan.from_dict(manifest.plan).diff(state.plan) or ["the plan is the one it was saved under"]:
        say(f"  {difference}")


def compare(where: Path, losses: dict[str, float]) -> None:
    uninterrupted = json.loads((where / "losses.json").read_text())
    differences = [abs(losses[step] - uninterrupted[step]) for step in losses if step in uninterrupted]
    say(f"largest difference from the uninterrupted run: {max(differences, default=0):.1e} over {len(differences)} steps")


def export(state: on_torch.State, where: Path, path: Path) -> None:
    """Export the model to one file of plain tensors. Reads one tensor of the checkpoint at a time, so no rank ever holds the
    full model."""
    last = fs.checkpoint.save(where, state)
    ids_BT = torch.arange(64).view(1, 64)
    sharded = on_torch.evaluate(state, [{"input_ids": ids_BT[:, :-1], "labels": ids_BT[:, 1:]}])["loss"]
    if on_torch.is_first():
        path.unlink(missing_ok=True)
        export_checkpoint(last, path, "torch")
        plain = Llama(SIZE)  # an ordinary model without ranks or plan
        plain.load_state_dict(torch.load(path, weights_only=True))
        loss = torch.nn.functional.cross_entropy(plain(ids_BT[:, :-1]).flatten(0, 1), ids_BT[:, 1:].flatten())
        say(f"exported {path}: loss of the file in plain torch {loss.item():.6f}, of the sharded model {sharded:.6f}")


def say(text: str) -> None:
    if on_torch.is_first():
        print(text, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--save", type=Path, metavar="DIR", default=Path("runs/examples/checkpoint"))
    mode.add_argument("--resume", type=Path, metavar="DIR", help="resume from this checkpoint instead of starting anew")
    parser.add_argument("--strategy", default="zero3", choices=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--steps", type=int, default=12, help="steps of the full run; the checkpoint is saved after half of them")
    return parser.parse_args()


if __name__ == "__main__":
    main()
