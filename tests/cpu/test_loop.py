"""The loop at large: skipped steps, stops, samples, where numbers go, optimizers by name."""

import json
import math
from pathlib import Path

import pytest
import torch

import fullshard as fs
from fullshard import FullshardError
from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Local
from fullshard.data.pack_tokens import pack
from fullshard.on_torch import initialize, load_model, summed_loss
from fullshard.runs.prepare.prepare import prepare
from fullshard.runs.recipe.recipe import load_recipe
from fullshard.runs.run_directory import refuse_run
from tests.cpu import loop
from tests.cpu.test_train import MODEL, RECIPE, metrics


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("loop")
    (path / "model.py").write_text(MODEL)
    (path / "recipe.toml").write_text(RECIPE)
    texts = sorted(Path(json.__file__).parent.glob("*.py"))
    pack(texts, path / "tokens", workers=1)
    pack(texts[:1], path / "valid", workers=1)
    return path


@pytest.mark.parametrize("optimizer", [fs.AdamW(lr=1e-3), fs.SGD(lr=1e-2, momentum=0.9), fs.TorchOptimizer("Adagrad", 1e-2)])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(ranks, optimizer):
    for found in ranks(2).run(loop.skip, optimizer):
        assert found["skipped"] == [True, False]
        assert found["unchanged"]
        assert found["changed"]
        assert math.isfinite(found["loss"])


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adagrad", ()),
        ("RMSprop", (("momentum", 0.9),)),
        ("NAdam", ()),
        ("RAdam", ()),
        ("Adamax", ()),
        ("Adadelta", ()),
        ("ASGD", ()),
    ],
)
def test_any_elementwise_torch_optimizer_equals_itself_unsharded(ranks, name, options):
    for distance in ranks(2).run(loop.named, name, options):
        assert distance < 2e-5


def test_a_run_that_diverges_ends_by_itself(here, ranks):
    wild = ["optim.name=sgd", "optim.lr=1e30", "optim.weight_decay=0.0", "train.steps=40", "train.max_skips=3"]
    code, sentence = ranks(2).run(loop.ended, str(here), [*wild, "schedule.warmup=0"], "wild")[0]
    assert code == 3
    assert sentence.startswith("the run diverged at step ")
    assert "3 steps in a row were not finite" in sentence
    found = metrics(here / "runs/wild")
    assert found[-1] == {"event": "diverged", "step": found[-2]["step"]}
    assert found[-2]["step"] < 40
    assert found[-2]["skipped"] == 3
    assert found[-2]["grad_norm"] is None  # not finite


def test_early_stop_and_samples(here, ranks):
    overrides = ["data.valid=valid", "eval.every=1", "eval.batches=1", "eval.patience=2", "eval.min_delta=100.0"]
    overrides += ["sample.every=1", 'sample.prompts=["def ", "import"]', "sample.tokens=5", "log.tensorboard=true"]
    ranks(2).run(loop.run, str(here), overrides, "early")
    found = metrics(here / "runs/early")
    assert found[-1] == {"event": "no improvement", "step": 3}  # the first evaluation sets the mark, two do not beat it
    assert [m["step"] for m in found if "eval_loss" in m] == [1, 2, 3]
    samples = [json.loads(line) for line in (here / "runs/early/samples.jsonl").read_text().splitlines()]
    assert [(s["step"], s["prompt"]) for s in samples[:3]] == [(1, "def "), (1, "import"), (2, "def ")]
    assert all(s["text"].startswith(s["prompt"]) for s in samples)
    check_tensorboard(here / "runs/early/tensorboard", found)


def check_tensorboard(directory: Path, found: list[dict]) -> None:
    """Read back with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    losses = [m["loss"] for m in found if "loss" in m]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses)
    assert [e.step for e in events.Scalars("loss")] == [m["step"] for m in found if "loss" in m]
    if any("eval_loss" in m for m in found):
        assert [e.step for e in events.Scalars("eval_loss")] == [1, 2, 3]


def test_numbers_of_a_step(here, ranks):
    ranks(2).run(loop.run, str(here), ["train.steps=2", "log.unit_norms=true"], "numbers")
    for line in metrics(here / "runs/numbers"):
        phases = sum(line[f"{p}_seconds"] for p in ("forward", "backward", "update"))
        assert 0 < phases < line["seconds"]
        assert 0 <= line["data_wait_seconds"] < line["seconds"]
        assert line["tokens"] == 8 * 32
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert line["mfu"] is None  # nobody publishes a CPU's peak
        assert line["memory_allocated"] > 0
        assert 10 << 20 < line["host_rss"] < 1 << 40
        units = [key for key in line if key.startswith("grad_norm/")]
        assert units == [f"grad_norm/{u}" for u in ("embed", "model.layers.0", "model.layers.1", "head")]
        assert sum(line[u] ** 2 for u in units) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-6)


@pytest.mark.full
def test_a_run_that_fails_before_its_first_step_may_be_made_again(here, ranks):
    """And says nothing of how it ended. The one that follows it in the directory has all its steps, and says so."""
    (here / "broken.py").write_text("def loss(model, batch):\n    raise ValueError('planted')\n")
    run = here / "runs/again"
    before = loop_said(ranks, here, ["train.loss=broken.py:loss"])
    assert "ValueError: planted" in before["error"]
    assert (run / "metrics.jsonl").exists()
    refuse_run(run)
    assert "trained " not in before["said"]
    after = loop_said(ranks, here, ["checkpoint.every=3"])
    assert after["error"] is None
    assert [m["step"] for m in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert json.loads((run / "run.json").read_text())["engine"] == "torch"
    saved, lines = "runs/again/checkpoints/step-00000006", after["said"].splitlines()
    assert [line.partition(",")[0] for line in lines if ": saved " in line] == [
        f"step {n}: saved {saved[:-1]}{n}" for n in (3, 6)
    ]
    assert lines[-4].endswith(f"(step 6 of 6), loss {metrics(run)[-1]['loss']:.4f}")
    assert lines[-3:-1] == ["run         runs/again", f"checkpoint  {saved}"]
    assert lines[-1] == "export      fullshard checkpoint export runs/again -o model.pt --format torch"
    with pytest.raises(FullshardError, match="holds a run already"):
        refuse_run(run)


def loop_said(ranks, here: Path, overrides: list[str]) -> dict:
    return ranks(2).run(loop.said, str(here), overrides, "again")[0]


@pytest.mark.full
def test_a_run_says_once_which_kernels_update_state_elsewhere(here, ranks):
    options = ["train.steps=2", "home.optimizer=host", "plan.compute=bf16"]
    printed = ranks(1).run(loop.without_a_compiler, str(here), options, "kernels")[0]
    events = [m for m in metrics(here / "runs/kernels") if "event" in m]
    said = "there is no C compiler (no-such-compiler)"
    gpu = "torch (Triton's kernel is for packed state on a GPU)"
    assert [e for e in events if e["event"] == "kernels"] == [
        {"event": "kernels", "step": 0, "cpu_update": f"torch: {said}", "gpu_update": gpu}
    ]
    assert printed.count(f"CPU updates run on torch's slower kernels: {said}") == 1


def test_a_resumed_run_goes_on_in_the_same_log(here, ranks):
    """Weights & Biases, offline: one id. TensorBoard: each step once, what was logged after the checkpoint but once too."""
    options = ["train.steps=4", "checkpoint.every=2", "log.wandb=fullshard-test", "log.tensorboard=true"]
    ranks(1).run(loop.run_offline, str(here), options, "logged")
    run = here / "runs/logged"
    commit.remove(Local(run / "checkpoints"), "step-00000004")
    ranks(1).run(loop.resume, str(here), options, "logged")
    files = [p.name for p in run.rglob("*.wandb")]
    assert files == [f"run-{(run / 'wandb-id').read_text().strip()}.wandb"] * 2  # a file a session, one id
    assert [m["step"] for m in metrics(run)] == [1, 2, 3, 4]
    check_tensorboard(run / "tensorboard", metrics(run))


@pytest.mark.parametrize("name", ["llama-nano", "gpt-nano"])
def test_documents_apart_are_documents_alone(name):
    model = load_model(name)
    initialize(model, torch.device("cpu"), seed=0)
    ids, labels = torch.randint(0, 64, (2, 2, 20))
    positions = torch.cat([torch.arange(7), torch.arange(9), torch.arange(4)]).expand(2, 20)
    apart = summed_loss(model, {"input_ids": ids, "labels": labels, "position_ids": positions})
    alone = [summed_loss(model, {"input_ids": ids[:, a:b], "labels": labels[:, a:b]}) for a, b in ((0, 7), (7, 16), (16, 20))]
    together = summed_loss(model, {"input_ids": ids, "labels": labels})
    assert apart.item() == pytest.approx(sum(alone).item(), rel=1e-6)
    assert abs(together.item() - apart.item()) > 1e-3


OWN_MODEL = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))
"""
BAD = {
    "optim.name=lion": "torch.optim has no optimizer 'lion'",
    "optim.name=lbfgs": "torch.optim.LBFGS cannot train shards",
    "optim.name=muon": "torch.optim.Muon cannot train shards",
    "optim.name=rmsprop optim.options.beta=2": "torch.optim.RMSprop:",
    "model.weights=nowhere": "model.weights = 'nowhere' is no directory",
    "model.weights=tokens": "tokens has no .safetensors files",
    "model.name=own.py:make data.boundaries=attention": "needs a model whose forward takes position_ids",
    "lora.rank=4 lora.targets=['qproj']": "no linear is called 'qproj'",
    "lora.rank=4": "lora trains adapters on weights that model.py:make has not",
    "plan.strategy=hpz": "plan.strategy = 'hpz' needs plan.reshard",
    "plan.replicate=2": "plan.replicate has no effect with plan.strategy = 'zero3'; write plan.strategy = 'hybrid'",
    "plan.keep_whole=['embed']": "plan.keep_whole has no effect with plan.strategy = 'zero3'",
    "plan.strategy=mixed plan.keep_whole=['emb']": "no unit matches 'emb'",
    "plan.sync=last train.global_batch=4": "batch.sync = 'last' has no effect",
    "data.valid=other eval.every=1": "were packed with different tokenizers",
    "data.path=damaged": "is damaged: ",
    "sample.every=1 sample.prompts=['a'] sample.tokenizer=none.json": "there is no tokenizer file none.json",
}


@pytest.mark.parametrize("overrides", BAD)
def test_bad_input_is_one_sentence(here, monkeypatch, overrides):
    monkeypatch.chdir(here)
    Path("own.py").write_text(OWN_MODEL)
    if not Path("other").exists():
        make_odd_data()
    with pytest.raises(FullshardError) as caught:
        prepare(load_recipe("recipe.toml", overrides.split()), 2)
    assert BAD[overrides] in str(caught.value)


def make_odd_data() -> None:
    from fullshard.data import TokenWriter

    with TokenWriter("other", vocab=200, tokenizer="words") as writer:
        writer.add(range(100))
    pack(sorted(Path(json.__file__).parent.glob("*.py"))[:1], "damaged", workers=1)
    tokens = Path("damaged/00000.tokens")
    tokens.write_bytes(tokens.read_bytes()[:-5])
