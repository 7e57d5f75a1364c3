"""Every recipe that ships, run at a small size on two ranks: what it says trains, and the run's directory is as documented."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fullshard.data import Batches, TokenFile
from tests.cpu import recipes

ROOT = Path(__file__).parents[2]
LLAMA = ["model.name=models.py:llama", "data.sequence=32", "train.tokens=1024", "train.global_batch=8", "plan.compile=false"]
CHAT = ["data.sequence=48", "train.steps=4", "train.global_batch=8", "eval.every=2", "eval.batches=2"]

FEW = ["train.steps=6", "train.global_batch=8", "train.micro_batch=4", "schedule.warmup=1", "eval.every=3", "eval.batches=1"]
BYTES = [*FEW, "data.tokenizer=bytes", "data.workers=1"]

# Only sizes: what a recipe chooses stays as it is.
SMALLER = {
    "bytes.toml": [
        "data.path=bytes",
        "data.sequence=32",
        "train.steps=12",
        "schedule.warmup=2",
        "sample.every=6",
        "sample.tokens=4",
    ],
    "gpt.toml": ["data.path=bytes", "model.name=models.py:gpt", "train.steps=4", "train.global_batch=64"],
    "llama-125m.toml": [*LLAMA, "train.micro_batch=4", "schedule.warmup=2", "eval.every=2", "eval.batches=2"],
    "llama3-8b.toml": [*LLAMA, "schedule.warmup=1", "schedule.decay=2"],
    "offload.toml": [*LLAMA, "schedule.warmup=2"],
    "nodes.toml": [*LLAMA, "schedule.warmup=2", "plan.replicate=2"],
    "finetune.toml": [*CHAT, "schedule.warmup=1"],
    "lora.toml": [*CHAT, "schedule.warmup=1"],
    "masked.toml": [*BYTES, "model.name=other.py:bert", "data.sequence=32"],
    "seq2seq.toml": [*BYTES, "model.name=other.py:t5", "data.sequence=16"],
    "images.toml": [*FEW, "model.name=other.py:vit", "data.workers=1", "optim.lr=1e-2"],
}
OTHER = ("masked.toml", "seq2seq.toml", "images.toml")


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipes")
    recipes.make_inputs(path)
    recipes.make_other_inputs(path)
    return path


def train(ranks, here: Path, name: str) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    directory = here / "runs" / name
    if not (directory / "metrics.jsonl").exists():  # once a session: several tests look at it
        torch.save(ranks(2).run(recipes.run, here, ROOT / "recipes" / name, SMALLER[name], directory), here / f"{name}.pt")
    return directory, torch.load(here / f"{name}.pt")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def documented_keys() -> set[str]:
    """The keys of a step's line, from the page's table; those of a GPU alone left out."""
    section = (ROOT / "docs/reference/run.md").read_text().split("## metrics.jsonl")[1]
    first_table = next(block for block in section.split("\n\n") if block.startswith("|"))
    rows = [row.split("|")[1:3] for row in first_table.splitlines() if row.startswith("| `")]
    return {key for keys, text in rows for key in re.findall(r"`(\w+)`", keys) if "(GPU)" not in text}


def expected_keys(name: str) -> set[str]:
    """Other objectives than causal count samples, and their losses tell the accuracy."""
    if name not in OTHER:
        return documented_keys()
    return documented_keys() - {"tokens", "tokens_per_second"} | {"samples", "samples_per_second", "accuracy"}


def test_every_recipe_is_run():
    assert sorted(SMALLER) == sorted(p.name for p in (ROOT / "recipes").glob("*.toml"))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.oldest_torch) if name == "seq2seq.toml" else name for name in SMALLER]
)
def test_a_recipe_trains_and_leaves_what_is_documented(ranks, here, name):
    directory, _ = train(ranks, here, name)
    recipe = json.loads((directory / "recipe.json").read_text())
    found = lines(directory / "metrics.jsonl")
    steps = [line for line in found if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert len(steps) == recipe["train"]["steps"] or len(steps) * 8 * 32 == recipe["train"]["tokens"]
    assert all(set(line) == expected_keys(name) for line in steps)
    assert all(math.isfinite(line[key]) for line in steps for key in ("loss", "grad_norm", "lr", "seconds"))
    every = recipe["eval"]["every"]
    assert [line["step"] for line in found if "eval_loss" in line] == [
        s for s in range(1, len(steps) + 1) if every and s % every == 0
    ]
    assert (directory / "plan.json").exists()


def test_bytes_are_learned_and_samples_written(ranks, here):
    directory, _ = train(ranks, here, "bytes.toml")
    losses = [line["loss"] for line in lines(directory / "metrics.jsonl") if "loss" in line]
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)  # knows nothing
    assert losses[-1] < losses[0] - 1.5
    assert [(s["step"], s["prompt"]) for s in lines(directory / "samples.jsonl")] == [(6, "The "), (12, "The ")]


@pytest.mark.parametrize("name", ["finetune.toml", "lora.toml"])
def test_fine_tuning_starts_from_the_weights_that_are_there(ranks, here, name):
    """The first loss, before any update, is the one that transformers computes on the same answers."""
    from transformers import AutoModelForCausalLM

    directory, _ = train(ranks, here, name)
    (batch,) = next(iter(Batches(TokenFile(here / "chat"), 48, 8, boundaries="attention", packing="whole")))
    model = AutoModelForCausalLM.from_pretrained(here / "path/to/model", attn_implementation="eager").bfloat16()
    total = count = 0.0
    for ids, labels, positions in zip(*(torch.as_tensor(batch[k]) for k in ("input_ids", "labels", "position_ids")), strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for a, b in pairwise(starts):  # a conversation at a time: nothing can leak
            with torch.no_grad():
                logits = model(ids[None, a:b]).logits[0].float()
            total += float(torch.nn.functional.cross_entropy(logits, labels[a:b], ignore_index=-100, reduction="sum"))
            count += int((labels[a:b] != -100).sum())
    assert lines(directory / "metrics.jsonl")[0]["loss"] == pytest.approx(total / count, rel=2e-3)
    assert lines(directory / "metrics.jsonl")[0]["tokens"] == count


def test_adapters_learn_and_the_model_stays_bit_for_bit(ranks, here):
    from safetensors.torch import load_file

    before = load_file(here / "path/to/model/model.safetensors")
    for weights in train(ranks, here, "lora.toml")[1]:
        assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
        raised = [w for n, w in weights.items() if ".lora_B." in n]
        assert len(raised) == 2 * 7
        assert all(w.any() for w in raised)  # they start at zero


def test_full_fine_tuning_moves_every_weight(ranks, here):
    from safetensors.torch import load_file

    before = load_file(here / "path/to/model/model.safetensors")
    for weights in train(ranks, here, "finetune.toml")[1]:
        assert set(weights) == set(before)
        assert not any(torch.equal(weights[name], tensor) for name, tensor in before.items())
