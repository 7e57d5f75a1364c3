"""The demo: a byte-level Llama learns Python from the sources of the standard library, on two ranks.

    python examples/demo.py            # or: make demo

Prints the unit table and the plan, trains with a progress bar, and samples from the sharded model. At the end it prints
the bytes that a rank holds under zero3 and under ddp, counted from the tensors.
"""

import argparse
import functools
import sys
import sysconfig
from pathlib import Path

import torch.distributed as dist

import fullshard as fs
from fullshard import on_torch
from fullshard.base.text import bytes_text, table
from fullshard.data import Batches, TokenFile
from fullshard.data.pack_tokens import pack
from fullshard.launch.local import inside_ranks, start_ranks
from fullshard.runs.progress import Bar

PEAK_LR = 4e-3
SEQUENCE, MICRO_BATCH, SEED = 128, 8, 0


def main() -> None:
    args = arguments()
    if not inside_ranks():
        standard_library()  # packed once, before the ranks start
        print(f"starting {args.ranks} ranks, each of which imports torch first …", flush=True)
        start_ranks(args.ranks, [__file__, *sys.argv[1:]])
    device = on_torch.start()
    first = dist.get_rank() == 0
    say = functools.partial(print, flush=True) if first else lambda *_: None

    tokens = TokenFile(standard_library())
    model = on_torch.load_model("llama-bytes")
    description = on_torch.describe(model, title="llama-bytes")
    plan = fs.zero3(description, devices=dist.get_world_size(), batch=fs.Batch(args.rows, SEQUENCE))
    say(f"{description}\n\n{plan}\n")
    text, ranks = bytes_text(len(tokens)), f"{dist.get_world_size()} ranks on {device.type}"
    say(f"training {args.steps} steps on {text} of Python's standard library, {ranks} …\n")

    state = on_torch.shard(model, plan, optimizer=fs.AdamW(lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1), seed=SEED)
    batches = Batches(tokens, SEQUENCE, args.rows, rank=on_torch.data_rank(plan.mesh), ranks=plan.mesh.data, seed=SEED)
    with Bar(args.steps, visible=first) as bar:
        rate = lambda i: PEAK_LR * min(1.0, (i + 1) / 20) * max(0.05, 1 - i / args.steps)
        for step in fs.train(state, batches, steps=args.steps, clip=1.0, lr=rate):
            loss, held = step.loss.item(), sum(state.held_bytes().values())
            bar.update(step.index, loss, step.count.item(), held, sum(step.seconds().values()))

    say(f"\nsampling {args.sample} bytes twice; every rank computes, and layers are gathered for each byte …")
    for prompt in ("def ", "import "):
        sample = on_torch.generate(state.model, list(prompt.encode()), max_new_tokens=args.sample, temperature=0.6, seed=SEED)
        say(f"\n--- the model continues {prompt!r}\n{bytes(sample).decode(errors='replace')}")
    say("\ncounting what a rank holds, and the same under ddp …")
    say(f"\n{held_table(state, description, batches)}")
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400, help="more steps, better text")
    parser.add_argument("--rows", type=int, default=MICRO_BATCH, help="sequences that a rank computes in a step")
    parser.add_argument("--sample", type=int, default=160, help="bytes to sample")
    return parser.parse_args()


def standard_library() -> Path:
    """Pack the top-level modules of Python's standard library, text that every machine has, into token files."""
    path = Path("runs/demo/tokens")
    if not path.exists():
        print(f"packing Python's standard library into {path}, once …", flush=True)
        pack(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), path)
    return path


def held_table(state: on_torch.State, description: fs.Description, batches: Batches) -> str:
    """A table of the bytes that a rank holds between steps, under this plan and under ddp on the same ranks."""
    ranks = dist.get_world_size()
    ddp = fs.ddp(description, devices=ranks, batch=state.plan.batch)
    other = on_torch.shard(on_torch.load_model("llama-bytes"), ddp, optimizer=fs.AdamW(lr=1e-3), seed=SEED)
    on_torch.train_step(other, next(iter(batches)))
    rows = []
    for kind in ("params", "optimizer"):
        replicated, sharded = other.held_bytes()[kind], state.held_bytes()[kind]
        rows.append([kind, bytes_text(replicated), bytes_text(sharded), f"{replicated / sharded:.2f}×"])
    return table([f"held by a rank of {ranks}", "ddp", "zero3", "less"], rows, right=(1, 2, 3))


if __name__ == "__main__":
    main()
