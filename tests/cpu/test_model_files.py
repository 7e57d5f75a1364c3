"""Model files as other people write them run unedited: their initial values, their ways to be called."""

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fullshard as fs
from fullshard import FullshardError, on_torch
from fullshard.commands.cli import app
from fullshard.data.pack_tokens import pack
from fullshard.on_torch.model.model_call import logits, set_call
from fullshard.runs.recipe.recipe import make_recipe
from tests.cpu import model_files
from tests.cpu.model_files import FILE, KINDS, LENGTH, SEED, VOCAB
from tests.cpu.test_train import metrics

# -- initial values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "strategy"), [(1, "zero3"), (2, "zero3"), (2, "ddp"), (4, "zero3")])
def test_the_values_are_the_factorys_own_to_the_bit(ranks, world, strategy):
    want = model_files.own_digests("Tiny")
    assert {"waves", "turns", "blocks.0.proj.weight", "norm.weight"} <= set(want)
    for found, notes in ranks(world).run(model_files.sharded_digests, "Tiny", strategy):
        assert found == want
        assert notes == (f"{FILE}:Tiny sets 23 tensors itself: the model was built once in host memory, 20.42 KiB",)


def test_a_factory_in_python_and_one_that_meta_cannot_build(ranks):
    assert ranks(2).run(model_files.sharded_digests, "Tiny", "zero3", "factory")[1][0] == model_files.own_digests("Tiny")
    assert ranks(2).run(model_files.sharded_digests, "Reading", "zero3")[1][0] == model_files.own_digests("Reading")


def test_an_unsharded_model_gets_the_same_values():
    model = on_torch.load_model(f"{FILE}:Tiny")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers(), model.turns))
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    on_torch.initialize(model, torch.device("cpu"), SEED)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model_files.digests(model) == model_files.own_digests("Tiny")
    assert model.embed.weight is model.lm_head.weight


def test_a_rule_that_building_does_not_call_is_told(ranks):
    found, notes = ranks(2).run(model_files.sharded_digests, "Late", "zero3")[1]
    assert found == model_files.own_digests("Late")
    assert notes[1].startswith(f"{FILE}:Late never calls the model's _init_weights; write model.init = 'modules'")


@pytest.mark.parametrize(
    ("kind", "init", "sentence"),
    [
        ("Forgetful", "factory", "norm.bias was never initialised (or is NaN): "),
        ("Tiny", "modules", "blocks.0.norm.bias, blocks.0.norm.weight, "),
        ("Huge", "factory", f"{FILE}:Huge takes 8.00 TiB of host memory to build, but "),
    ],
)
def test_what_has_no_values_is_refused(ranks, kind, init, sentence):
    for found in ranks(2).run(model_files.refused, kind, init):
        assert found.startswith(sentence)
        assert ("init=on_torch.Factory(" in found) != (kind == "Huge")
        assert ("model.init = 'modules'" in found) == (kind == "Huge")


def test_what_a_factory_prints_is_no_output(capsys):
    on_torch.load_model(f"{FILE}:Tiny")
    assert capsys.readouterr() == ("", "a model that talks\n")


def test_a_file_imports_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_the_factory.py").write_text("import torch\nclass Own(torch.nn.Linear): pass\n")
    (tmp_path / "make.py").write_text("from beside_the_factory import Own\ndef make(): return Own(2, 3)\n")
    assert type(on_torch.load_model(f"{tmp_path}/make.py:make")).__name__ == "Own"


# -- the call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Tiny", "Flat", "Named", "Plain"])
def test_logits_of_all_positions(kind):
    model, ids = KINDS[kind](), model_files.global_batch(0)["input_ids"]
    want = model_files.all_logits(kind, model, ids)
    assert torch.equal(logits(model, {"input_ids": ids, "labels": ids}), want)
    batch = model_files.global_batch(0)
    plain, chunked = (f(model, batch) for f in (on_torch.summed_loss, on_torch.chunked_loss))
    assert plain.item() == pytest.approx(chunked.item(), rel=1e-6)
    plain.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    chunked.backward()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)


@pytest.mark.parametrize(
    ("kind", "loss", "sentence"),
    [
        (model_files.Recurrent, on_torch.summed_loss, "Recurrent's forward needs state, which a batch of tokens has not; write"),
        (model_files.Capped, on_torch.chunked_loss, "chunked loss: Capped computes with its logits (shape '[8, 16, 256]' is"),
        (lambda: torch.nn.Embedding(VOCAB, 1).apply(_last), on_torch.summed_loss, "Embedding returns a tensor of shape [8, 1]"),
    ],
)
def test_what_cannot_be_called_is_refused(kind, loss, sentence):
    with pytest.raises(FullshardError) as caught:
        loss(kind(), model_files.global_batch(0))
    assert str(caught.value).startswith(sentence)


def _last(module: torch.nn.Module) -> None:
    module.register_forward_hook(lambda m, args, output: output[:, -1])


@pytest.mark.parametrize(("kind", "loss"), [("Tiny", "chunked"), ("Tiny", "plain"), ("Flat", "chunked"), ("Recurrent", "call")])
def test_sharded_training_is_unsharded(ranks, kind, loss):
    want, tokens = model_files.by_hand(kind)
    for found, continued, evaluated in ranks(2).run(model_files.trained, kind, loss):
        assert found == pytest.approx(want, abs=1e-6)
        assert continued == tokens
        assert evaluated < found[0] - 1e-3


@pytest.mark.parametrize(
    ("kind", "call", "losses"), [("Tiny", None, {"chunked", "plain"}), ("Plain", "call_and_count", {"plain"})]
)
def test_costs_are_traced(kind, call, losses):
    model = on_torch.load_model(f"{FILE}:{kind}", call=call and f"{FILE}:{call}")
    found = on_torch.describe(model, micro_batch=2, sequence=LENGTH, compute="fp32")
    assert {key[1] for key in found.costs.traces} == losses
    cluster = fs.Cluster.load("1xcpu")
    plan = fs.zero3(found, devices=1, batch=fs.Batch(2, LENGTH), precision=fs.Precision("fp32", "fp32", "fp32"))
    assert fs.estimate(plan, found, cluster, loss=min(losses)).step_seconds > 0


def test_a_loss_of_ones_own_cannot_be_sampled():
    model = KINDS["Recurrent"]()
    set_call(model, model_files.call_loss)
    with pytest.raises(FullshardError, match=r"^model\.call returns a Loss, no logits to sample from"):
        on_torch.generate(model, [1], max_new_tokens=1)
    with pytest.raises(FullshardError, match=r"^model\.call returns a Loss of its own; give train_step"):
        on_torch.summed_loss(model, model_files.global_batch(0))


PLAN = f"plan {FILE}:Recurrent --cluster 1xcpu --sequence {LENGTH} --global-batch 2"


def test_a_plan_calls_the_model_through_its_call():
    line = PLAN.replace("Recurrent", "Plain").split()
    found = CliRunner().invoke(app, [*line, "--call", f"{FILE}:call_and_count", "--json"])
    model = on_torch.load_model(f"{FILE}:Plain", call=f"{FILE}:call_and_count")
    described = on_torch.describe(model, micro_batch=1, sequence=LENGTH, compute="fp32")
    want = fs.find_plan(described, fs.Cluster.load("1xcpu"), sequence=LENGTH, global_batch=2, loss="plain")
    assert json.loads(found.stdout)["estimate"] == json.loads(json.dumps(want.estimate.to_dict()))


def fetch_tokens(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["tokens"])


def count_labels(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    return batch["labels"].numel()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (PLAN, "Recurrent's forward needs state, which a batch of tokens has not; write"),
        (f"{PLAN} --call {FILE}", f"--call {FILE} names no callable; write --call file.py:callable"),
        (f"{PLAN} --call none.py:call", "there is no file none.py; write path/to/file.py:callable"),
        (f"{PLAN} --call {FILE}:call_recurent", f"{FILE} has no 'call_recurent'; did you mean 'call_recurrent'?"),
        (f"{PLAN} --call {FILE}:call_loss --loss chunked", "--loss chunked has no effect with --call; leave it out"),
        (f"{PLAN} --call {__file__}:count_labels", "model.call returned an int for labels of shape"),
        (f"{PLAN} --call {__file__}:fetch_tokens", f"{FILE}:Recurrent does not run at 1 × {LENGTH} with parameters in fp32: 'to"),
        (
            f"plan {FILE}:Recurrent --devices 2 --call {FILE}:call_loss",
            "--call has no effect with --devices; write --cluster, or",
        ),
    ],
)
def test_a_call_that_cannot_be_planned_is_one_sentence(line, sentence):
    result = CliRunner().invoke(app, line.split())
    assert isinstance(result.exception, FullshardError)
    assert str(result.exception).startswith(sentence)


# -- recipes -------------------------------------------------------------------------------------------------

TREE = {
    "data": {"path": "tokens", "sequence": LENGTH},
    "optim": {"lr": 0.01, "name": "sgd"},
    "train": {"steps": 4, "global_batch": 8, "micro_batch": 2},
}


def test_a_call_has_the_plain_loss():
    model = {"name": "a.py:make", "call": "a.py:call"}
    assert make_recipe(TREE | {"model": model}, "r").loss == "plain"
    assert make_recipe(TREE | {"model": {"name": "a.py:make"}}, "r").loss == "chunked"
    with pytest.raises(FullshardError, match=r"train\.loss = 'chunked' has no effect with model\.call; leave it out"):
        make_recipe(TREE | {"model": model, "train": TREE["train"] | {"loss": "chunked"}}, "r")
    with pytest.raises(FullshardError, match=r"model\.init = 'modules' has no effect; leave it out"):
        on_torch.load_model("llama-nano", init="modules")


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("files")
    pack(sorted(Path(json.__file__).parent.glob("*.py")), path / "tokens", workers=1)
    lines = [
        'plan = "zero3"',
        "[data]",
        'path = "tokens"',
        'valid = "tokens"',
        f"sequence = {LENGTH}",
        "[optim]",
        'name = "sgd"',
        "lr = 0.1",
    ]
    lines += ["[schedule]", 'kind = "constant"']
    lines += ["[train]", "steps = 4", "global_batch = 8", "micro_batch = 2", "[checkpoint]", "every = 2"]
    (path / "recipe.toml").write_text("\n".join([*lines, "[eval]", "every = 2", "batches = 1", ""]))
    return path


def test_a_run_samples_evaluates_and_resumes(ranks, here):
    options = [f"model.name={FILE}:Tiny", "sample.every=2", 'sample.prompts=["def "]', "sample.tokens=4"]
    said = ranks(2).run(model_files.run, str(here), options, "whole")
    ranks(2).run(model_files.run, str(here), [*options, "train.steps=2"], "half")
    ranks(2).run(model_files.run, str(here), options, "half", "auto")
    whole, half = metrics(here / "runs/whole"), metrics(here / "runs/half")
    assert next(m["loss"] for m in whole if "loss" in m) == pytest.approx(math.log(VOCAB), rel=0.02)
    assert [m["step"] for m in whole if "eval_loss" in m] == [2, 4]
    assert [m["loss"] for m in half if "loss" in m] == [m["loss"] for m in whole if "loss" in m]
    assert ["sets 23 tensors itself: the model was built once in host memory" in text for text in said] == [True, False]


def test_a_run_with_a_call_that_returns_a_loss(ranks, here):
    ranks(2).run(model_files.run, str(here), [f"model.name={FILE}:Recurrent", f"model.call={FILE}:call_loss"], "called")
    found = [m for m in metrics(here / "runs/called") if "loss" in m]
    first, last = [m["eval_loss"] for m in metrics(here / "runs/called") if "eval_loss" in m]
    assert found[0]["bits"] == pytest.approx(found[0]["loss"] / math.log(2), rel=1e-6)
    assert last < first
