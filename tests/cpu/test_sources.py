"""Runs on data of any kind: trained as plain torch does, the same with and without workers, resumed to the bit."""

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fullshard as fs
from fullshard import FullshardError
from fullshard.checkpoint.directories import Local
from fullshard.data import Order, SampleBatches, SampleRules, StreamBatches
from fullshard.on_torch import describe, initialize, load_model, loss_of
from fullshard.on_torch.step.batch_loader import AheadLoader, collate, seeded
from fullshard.runs.prepare.prepare import prepare
from fullshard.runs.recipe.recipe import Recipe, load_recipe
from tests.cpu import loop, recipes
from tests.cpu.test_resume import forget
from tests.cpu.test_train import metrics, start, wait_until

FILE = """
import datasets
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from fullshard.on_torch import Loss

def model():
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))

class Reading(nn.Sequential):
    def forward(self, x):
        return super().forward(x if x.sum().item() > 0 else -x)

def reading():
    return Reading(nn.Linear(6, 3))

def classifier():
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 3}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**size, vocab_size=256, max_position_embeddings=64, hidden_dropout_prob=0.0)
    )

class Rows:
    def __len__(self):
        return 50

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": int(x[:3].argmax())}

class Noisy(Rows):
    def __getitem__(self, i):
        return (super().__getitem__(i)["x"] + torch.randn(6), i)

class Odd(Rows):
    def __getitem__(self, i):
        return {"x": torch.zeros(6 + i), "y": 0}

def stream():
    yield from (Rows()[i] for i in range(50))

def kept():
    rows = [{k: v.tolist() if k == "x" else v for k, v in Rows()[i].items()} for i in range(50)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=5)

def few():
    return [Rows()[i] for i in range(3)]

def nothing():
    return 3

def broken():
    raise OSError("the disk is gone")

def loss(model, batch):
    logits, labels = model(batch["x"].float()), batch["y"]
    return Loss(F.cross_entropy(logits, labels, reduction="sum"), len(labels), {"accuracy": (logits.argmax(-1) == labels).sum()})

def double(samples):
    found = torch.utils.data.default_collate([{k: s[k] for k in ("x", "y")} for s in samples])
    return {"x": 2 * found["x"], "y": found["y"]}
"""
RECIPE = """
plan = "zero3"
[model]
name = "own.py:model"
[data]
source = "own.py:Rows"
objective = "custom"
[optim]
lr = 1e-2
clip = "none"
weight_decay = 0.0
[schedule]
kind = "constant"
[train]
steps = 5
global_batch = 8
micro_batch = 2
loss = "own.py:loss"
[checkpoint]
every = 2
keep = 0
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sources")
    (path / "own.py").write_text(FILE)
    (path / "recipe.toml").write_text(RECIPE)
    recipes.make_other_inputs(path)
    (path / "labels.jsonl").write_text("\n".join(json.dumps({"text": "word " * (i % 3 + 1), "label": i % 3}) for i in range(30)))
    return path


def losses(here: Path, name: str) -> list[float]:
    return [m["loss"] for m in metrics(here / "runs" / name) if "loss" in m]


def by_hand(here: Path, order: Order, scale: float = 1.0) -> list[float]:
    """The same training with plain torch in one process: the oracle."""
    spaces: dict = {}
    exec(FILE, spaces)
    model = load_model(f"{here}/own.py:model")
    initialize(model, torch.device("cpu"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for step in range(5):
        rows = [spaces["Rows"]()[order[i]] for i in range(8 * step, 8 * step + 8)]
        logits = model(scale * torch.stack([row["x"] for row in rows]))
        loss = F.cross_entropy(logits, torch.tensor([row["y"] for row in rows]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "options", "shuffle", "scale"),
    [
        ("plain", ["data.workers=0"], True, 1.0),
        ("workers", ["data.workers=2", "data.collate=own.py:double"], True, 2.0),
        ("stream", ["data.source=own.py:stream", "data.workers=1"], False, 1.0),
    ],
)
def test_a_source_trains_as_plain_torch_does(here, ranks, name, options, shuffle, scale):
    ranks(2).run(loop.run, str(here), options, name)
    assert losses(here, name) == pytest.approx(by_hand(here, Order(50, 0, shuffle), scale), rel=2e-6)
    line = metrics(here / "runs" / name)[0]
    assert line["samples"] == 8
    assert 0 <= line["accuracy"] <= 1
    assert "tokens" not in line


@pytest.mark.quick(1)
@pytest.mark.parametrize("source", ["Rows", "stream", "kept"])
def test_a_resumed_run_is_the_uninterrupted_one(here, ranks, source):
    options, name = [f"data.source=own.py:{source}", "data.workers=1"], f"again-{source}"
    ranks(2).run(loop.run, str(here), options, name)
    whole = losses(here, name)
    manifest = json.loads((here / f"runs/{name}/checkpoints/step-00000002/manifest.json").read_text())
    state = manifest["state"]["extra"].get("stream")
    assert (state is not None) == (source == "kept")  # datasets' own can tell where it is
    forget(Local(here / f"runs/{name}/checkpoints"), 2)
    ranks(2).run(loop.resume, str(here), options, name)
    assert losses(here, name) == whole


def test_held_out_data_of_any_kind(here, ranks):
    options = [
        "data.valid=own.py:stream",
        "eval.every=2",
        "eval.batches=40",
        "eval.patience=1",
        "train.steps=20",
        "eval.min_delta=0.5",
    ]
    ranks(2).run(loop.run, str(here), options, "evaluated")
    found = metrics(here / "runs/evaluated")
    evaluated = [m for m in found if "eval_loss" in m]
    assert [m["step"] for m in evaluated] == [2, 4]  # then it ends: nothing improves
    assert found[-1] == {"event": "no improvement", "step": 4}
    assert 0 <= evaluated[0]["eval_accuracy"] <= 1


@pytest.mark.full
def test_classes_are_stored(here, ranks):
    options = ["data.path=images/train", "data.objective=image", "model.name=other.py:vit", "train.loss=auto"]
    (here / "images.toml").write_text(RECIPE.replace('source = "own.py:Rows"\nobjective = "custom"', 'path = "images/train"'))
    ranks(2).run(recipes.run, here, here / "images.toml", options, here / "runs/classes")
    assert json.loads((here / "runs/classes/classes.json").read_text()) == ["blue", "green", "red"]
    manifest = json.loads((here / "runs/classes/checkpoints/step-00000004/manifest.json").read_text())
    assert manifest["state"]["extra"]["data"]["classes"] == ["blue", "green", "red"]
    assert manifest["state"]["extra"]["data"]["samples"] == 36


# -- loading ahead -----------------------------------------------------------------------------------------------


def noisy(loader, shares: int = 1) -> list[tuple[torch.Tensor, ...]]:
    spaces: dict = {}
    exec(FILE, spaces)
    rules = SampleRules(collate=collate, seeded=seeded)
    sources = [
        SampleBatches(spaces["Noisy"](), 4 // shares, rank=r, ranks=shares, rules=rules, loader=loader) for r in range(shares)
    ]
    steps = [iter(source) for source in sources]
    found = [[next(step)[0] for step in steps] for _ in range(4)]
    for step in steps:
        step.close()
    return [tuple(torch.cat([batch[k] for batch in batches]) for k in (0, 1)) for batches in found]


def test_workers_threads_and_world_sizes_give_the_same_random_samples():
    """A data set that draws from torch's global generator gives each sample the same noise wherever it is read."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    wanted = noisy(AheadLoader(0, 0))
    for loader, shares in ((AheadLoader(2, 2), 1), (AheadLoader(1, 1), 2), (AheadLoader(0, 0), 4)):
        found = noisy(loader, shares)
        assert all(torch.equal(a, b) for w, f in zip(wanted, found, strict=True) for a, b in zip(w, f, strict=True))
    assert len({float(x) for noise, _ in wanted for x in noise.flatten()}) == 4 * 4 * 6
    assert torch.equal(before[0], torch.get_rng_state())  # the model's dropout draws as without data
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("loader", [AheadLoader(0, 2), AheadLoader(1, 2)], ids=["thread", "worker"])
def test_errors_come_through_and_the_cursor_counts_what_was_taken(loader):
    rows = [{"x": np.zeros(2)} for _ in range(8)] + [{"x": np.zeros(3)}, *({"x": np.zeros(2)} for _ in range(7))]
    source = SampleBatches(rows, 4, shuffle=False, loader=loader)
    steps = iter(source)
    next(steps)
    assert source.cursor == 4
    next(steps)
    with pytest.raises(FullshardError, match="sample 9 has x of 2, but the data set, sample 8 of 3"):
        next(steps)
    source.cursor = 12  # behind the bad batch, as after a rollback
    assert next(iter(source))[0]["x"].shape == (4, 2)
    stream = StreamBatches(lambda: iter(rows), 4, loader=loader)
    with pytest.raises(FullshardError, match="sample 9 has x of 2"):
        list(stream)


def test_a_worker_that_dies_is_a_sentence():
    class Deadly(list):
        def __getitem__(self, i):
            os._exit(3)

    with pytest.raises(FullshardError, match=r"a data worker died .*; write data.workers = 0 to see its error"):
        next(iter(SampleBatches(Deadly([1]), 1, loader=AheadLoader(1, 1))))


@pytest.mark.full
def test_a_signal_to_the_workers_too_ends_a_run_at_a_step(here):
    """As a scheduler sends it, to every process of the job."""
    run = here / "runs/signalled"
    process = start(here, "train.steps=100000", "data.workers=1", "checkpoint.every=0", "--run", str(run))
    try:
        wait_until(process, lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) >= 3)
        os.killpg(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 143, said
    assert metrics(run)[-1]["event"] == "stopped"
    assert "Traceback" not in said


# -- the planner's own plan --------------------------------------------------------------------------------------

AUTO = {
    "masked": ["model.name=other.py:bert", "data.path=texts.parquet", "data.sequence=24"],
    "seq2seq": ["model.name=other.py:t5", "data.path=pairs.jsonl", "data.sequence=24", "data.target_sequence=16"],
    "classify": ["model.name=own.py:classifier", "data.path=labels.jsonl", "data.sequence=24"],
    "image": ["model.name=other.py:vit", "data.path=images/train"],
}
WIDEST = {  # the largest batch of two rows, by hand
    "masked": {"input_ids": (2, 24), "attention_mask": (2, 24), "labels": (2, 24)},
    "seq2seq": {"input_ids": (2, 24), "attention_mask": (2, 24), "labels": (2, 16)},
    "classify": {"input_ids": (2, 24), "attention_mask": (2, 24), "labels": (2,)},
    "image": {"pixel_values": (2, 3, 8, 8), "labels": (2,)},
}


def auto_recipe(objective: str) -> Recipe:
    Path("auto.toml").write_text(RECIPE.replace('source = "own.py:Rows"', ""))
    tokenizer = [] if objective == "image" else ["data.tokenizer=bytes"]
    own = [*AUTO[objective], *tokenizer, f"data.objective={objective}", "train.loss=auto", "plan=auto"]
    return load_recipe("auto.toml", own)


@pytest.mark.quick(2)
@pytest.mark.parametrize("objective", AUTO)
def test_the_planner_plans_every_objective(here, monkeypatch, objective):
    monkeypatch.chdir(here)
    found = prepare(auto_recipe(objective), 2)
    kinds = {"pixel_values": torch.float32}
    example = {k: torch.ones(shape, dtype=kinds.get(k, torch.int64)) for k, shape in WIDEST[objective].items()}
    if "attention_mask" in example:
        example["attention_mask"][:, -1] = 0  # rows of text end in padding
    model = load_model(found.recipe.model.name)
    described = describe(model, example=example, loss=loss_of(model), compute="fp32")
    want = fs.find_plan(described, found.cluster, global_batch=8, fix={"compute": "fp32", "micro_batch": 2}, clip=False)
    assert (found.plan, found.estimate) == (want.plan, want.estimate)
    assert found.estimate.counted == "rows"


def test_a_plan_for_a_custom_loss_trains_and_is_a_file_for_the_next_run(ranks, here, monkeypatch):
    run, options = here / "runs/auto", ["data.workers=0", "plan=auto", "train.steps=2"]
    ranks(2).run(recipes.run, here, here / "recipe.toml", options, run)
    assert losses(here, "auto") == pytest.approx(by_hand(here, Order(50, 0, True))[:2], rel=1e-6)
    monkeypatch.chdir(here)
    again = prepare(load_recipe("recipe.toml", [f"plan={run}/plan.json"]), 2)
    assert again.plan.batch.dims == "6"


def test_what_cannot_be_traced_names_its_line(here, monkeypatch):
    monkeypatch.chdir(here)
    sentence = r"own.py:reading cannot be traced: .*own.py line \d+ .* reads values of tensors .*; plan by a named strategy"
    with pytest.raises(FullshardError, match=sentence):
        prepare(load_recipe("recipe.toml", ["model.name=own.py:reading", "plan=auto"]), 2)


# -- bad input, before any rank starts ----------------------------------------------------------------------------

CUSTOM = {
    "data.source=own.py:Rowz": "own.py has no 'Rowz'; did you mean 'Rows'?",
    "data.source=none.py:Rows": "there is no file none.py",
    "data.source=own.py": "data: source = 'own.py' names no callable; write source = 'file.py:callable'",
    "data.source=own.py:nothing": "own.py:nothing returned an int; return an object with __len__ and __getitem__",
    "data.source=own.py:broken": "own.py:broken raised OSError: the disk is gone",
    "data.source=own.py:Odd": "make their shapes equal, or write data.collate = 'file.py:callable'",
    "data.collate=own.py:nothing": "cannot be put into a batch (TypeError: nothing() takes 0 positional arguments",
    "data.path=x": "data: path and source exclude each other; leave one out",
    "data.mask=0.2": "data: mask has no effect with objective = 'custom'; leave it out",
    "data.columns.z=zz": "has no field 'zz' (it has x, y)",
    "data.objective=causal": "data: sequence is missing",
    "train.loss=auto": "data.objective = 'custom' needs train.loss = 'file.py:callable'",
    "train.loss=plain": "train.loss = 'plain' is of data.objective = 'causal', not 'custom'",
    "train.loss=plane": "there is no loss 'plane'; write auto, chunked, plain or file.py:callable; did you mean 'plain'?",
    "train.loss=own.py:lost": "own.py has no 'lost'; did you mean 'loss'?",
    "data.workers=-1": "data.workers = -1: input should be greater than or equal to 0",
}
IMAGE = {
    "data.path=nowhere": "data.path = 'nowhere': there is no such path",
    "data.path=images": "images/train holds folders, not images; write the path of one of them",
    "data.path=own.py": "data.path = 'own.py': cannot read .py",
    "data.image_size=16": "data.image_size = 16, but the model takes 8 × 8 pixels; leave it out",
    "data.resize=none": "pixels, the model takes 8 × 8; write data.resize = 'crop' or 'stretch'",
    "data.columns.picture=a": "data: columns.picture is unknown (known: image, label)",
    "data.std=[0.5, 0.5, 0.0]": "std = [0.5, 0.5, 0.0] must be above 0",
    "data.path=gone.csv": "gone.csv, row 1: there is no image none.png; add it, or remove the row",
    "data.path=far.csv": "far.csv, row 2 has the label 3, but the model has the classes 0 to 2",
    "data.path=pairs.jsonl": "pairs.jsonl has no column 'label' (it has source, target)",
}
TEXT = {
    "data.tokenizer=none.json": "there is no tokenizer file none.json",
    "data.columns.text=txt": "texts.parquet has no column 'txt' (it has text); did you mean 'text'?",
    "data.sequence=65": "data.sequence = 65 is longer than the model's 64; shorten it",
    "data.path=images": "images is no data for data.objective = 'masked'",
    "sample.every=2": "sample.every",
}


@pytest.mark.parametrize(
    ("kind", "override"), [(kind, key) for kind, table in (("custom", CUSTOM), ("image", IMAGE), ("text", TEXT)) for key in table]
)
def test_bad_input_is_found_before_any_rank_starts(here, monkeypatch, kind, override):
    monkeypatch.chdir(here)
    Path("gone.csv").write_text("image,label\nnone.png,0\n")
    Path("far.csv").write_text("image,label\nimages/train/red/1.png,0\nimages/train/red/1.png,3\n")
    own = ["model.name=other.py:vit", "data.objective=image", "train.loss=auto"]
    text = ["model.name=other.py:bert", "data.objective=masked", "data.sequence=16", "train.loss=auto"]
    base = {"image": [*own, "data.path=images/train"], "text": [*text, "data.path=texts.parquet", "data.tokenizer=bytes"]}
    sentence = {"image": IMAGE, "text": TEXT, "custom": CUSTOM}[kind][override]
    Path("bad.toml").write_text(RECIPE if kind == "custom" else RECIPE.replace('source = "own.py:Rows"', ""))
    more = ["sample.prompts=['a']"] if override.startswith("sample") else []
    with pytest.raises(FullshardError) as caught:
        prepare(load_recipe("bad.toml", [*base.get(kind, []), override, *more]), 2)
    assert sentence in str(caught.value)
    assert str(caught.value).count("\n") == 0
