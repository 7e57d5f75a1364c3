"""A recipe as a user would write it, with nothing of precision, kernels or memory, beside the step by hand in the same call.

    python -m benchmarks.default_recipe
    python -m benchmarks.default_recipe --preset llama-nano --batch 2 --sequence 16 --steps 6      # on a CPU, to try it

Rows: the recipe with `plan = "auto"`, the same without a plan, with `zero3` named, and in fp32 (its memory against the
prediction); then `benchmarks.resident_step`. Tokens a second are those of the median step after `WARM` of them. `share`: of
the tokens a second of the step by hand. The tokens are random.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.jax_step import last_line

WARM = 10  # steps that are not timed: the first ones compile
RECIPE = """
[model]
name = "{preset}"
[data]
path = "tokens"
sequence = {sequence}
[optim]
lr = 1e-4
[train]
steps = {steps}
global_batch = {batch}
[checkpoint]
minutes = 0.0
final = false
"""
ROWS = {
    "auto": ["plan=auto"],
    "no plan": [],
    "zero3": ["plan=zero3"],
    "fp32": ["plan=auto", "plan.compute=fp32"],
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1.5b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    return parser.parse_args()


def prepare(here: Path, args: argparse.Namespace) -> None:
    """The recipe and its random tokens."""
    import numpy as np

    from fullshard.data import TokenWriter
    from fullshard.model.presets import preset

    vocab = preset(args.preset).vocab
    with TokenWriter(here / "tokens", vocab=vocab, tokenizer="random") as writer:
        writer.add(np.random.default_rng(0).integers(0, vocab, 8 * args.batch * (args.sequence + 1)))
    (here / "recipe.toml").write_text(RECIPE.format(**vars(args)))


def train(here: Path, name: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """A run of one rank by the command line, and what it measured."""
    run = here / name.replace(" ", "-")
    line = [sys.executable, "-m", "fullshard", "train", "recipe.toml", *overrides, f"train.steps={steps}", "--run", str(run)]
    done = subprocess.run([*line, "--ranks", "1"], cwd=here, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [found for found in lines if "loss" in found][min(WARM, steps // 2) :]
    predicted = next((found for found in lines if found.get("event") == "predicted"), {})
    choices = json.loads((run / "plan.json").read_text())["choices"]
    return {
        "tok_s": round(statistics.median(found["tokens_per_second"] for found in measured)),
        "mfu": measured[-1]["mfu"],
        "peak_gib": max(found["memory_allocated"] for found in measured) / 2**30,
        "predicted": {key: value for key, value in predicted.items() if key.startswith(("predicted_", "measured_"))},
        "choices": {key: f"{choice['value']} ({choice['origin']})" for key, choice in choices.items()},
    }


def main() -> None:
    args = arguments()
    by_hand = [sys.executable, "-m", "benchmarks.resident_step", "--alone", "--preset", args.preset]
    found = last_line([*by_hand, "--batch", str(args.batch), "--sequence", str(args.sequence)])
    print(json.dumps({"row": "resident_step", **found}), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        prepare(here, args)
        for name in args.rows:
            row = train(here, name, ROWS[name], min(args.steps, 12) if name == "fp32" else args.steps)
            share = {"share": round(row["tok_s"] / found["tok_s"], 3)} if "tok_s" in row and found.get("tok_s") else {}
            print(json.dumps({"row": name, **share, **row}), flush=True)


if __name__ == "__main__":
    main()
