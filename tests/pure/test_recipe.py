"""Recipes: strict, overridable, and every mistake one sentence that names the key."""

import json
import math
import re
from pathlib import Path

import pytest

from fullshard import FullshardError
from fullshard.runs.recipe.lr_schedule import factor
from fullshard.runs.recipe.recipe import Recipe, load_recipe

SMALL = """
[model]
name = "llama-bytes"
[data]
path = "tokens"
sequence = 128
[optim]
lr = 1e-3
[train]
steps = 10
global_batch = 16
"""


def load(tmp_path, text: str = SMALL, *overrides: str) -> Recipe:
    (tmp_path / "r.toml").write_text(text)
    return load_recipe(tmp_path / "r.toml", list(overrides))


def test_defaults_and_overrides(tmp_path):
    recipe = load(tmp_path, SMALL, "optim.lr=3e-4", "plan.remat=full", "optim.betas=[0.8, 0.9]", "data.shuffle=false")
    assert recipe.optim.lr == 3e-4
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.plan.remat == "full"
    assert recipe.data.shuffle is False
    assert recipe.schedule.kind == "cosine"
    assert Recipe.model_validate_json(recipe.model_dump_json(), strict=False) == recipe


def test_overrides_of_a_short_plan(tmp_path):
    short, table = 'plan = "zero2"\n' + SMALL, SMALL + '[plan]\nstrategy = "zero2"\nremat = "full"\n'
    for text in (short, 'plan = { strategy = "zero2" }\n' + SMALL):
        plan = load(tmp_path, text, "plan.wire_gather=int8", "plan.remat=full").plan
        assert (plan.strategy, plan.wire_gather, plan.remat) == ("zero2", "int8", "full")
    assert load(tmp_path, short, "plan.strategy=zero1").plan.strategy == "zero1"
    assert load(tmp_path, short, "plan=zero1", "plan.remat=full").plan == load(tmp_path, table, "plan=zero1").plan
    for text, given in (
        (table.replace("strategy", "file").replace("zero2", "a.json").replace('remat = "full"', ""), ["plan=zero1"]),
        ('plan = "a.json"\n' + SMALL, ["plan.cluster=8xh100", "plan=zero1"]),
    ):
        plan = load(tmp_path, text, *given).plan
        assert (plan.strategy, plan.file) == ("zero1", None)
    assert load(tmp_path, 'plan = { strategy = "zero2" }\n' + SMALL, "plan=a.json").plan.file == "a.json"
    assert load(tmp_path, short, 'plan="a.json"', "plan.cluster=8xh100").plan.file == "a.json"
    assert load(tmp_path, 'plan = "a.json"\n' + SMALL, "plan=zero1").plan.file is None
    with pytest.raises(FullshardError, match="remat has no effect beside file; change the plan file instead"):
        load(tmp_path, 'plan = "a.json"\n' + SMALL, "plan.remat=full")


def test_homes(tmp_path):
    assert load(tmp_path, SMALL, "home.activations=disk", "disk.path=/data").home.activations == "disk"
    homes = ("home.params=device", "home.optimizer=disk", "home.activations=host")
    recipe = load(tmp_path, SMALL, *homes, "disk.path=/data", "home.staging=2")
    assert (recipe.home.params, recipe.home.optimizer, recipe.home.activations) == ("device", "disk", "host")
    assert (recipe.home.staging, recipe.disk.path) == (2, "/data")
    assert Recipe.model_validate_json(recipe.model_dump_json(), strict=False) == recipe
    assert load(tmp_path, SMALL, "plan=auto", "disk.path=/data").disk.path == "/data"  # for what does not fit elsewhere
    both = ("plan=zero3", "home.params=disk", "disk.path=/data")
    assert load(tmp_path, SMALL, *both, "home.optimizer=host").home.params == "disk"
    with pytest.raises(FullshardError, match=r"home\.params = 'disk' saves nothing while the optimizer's own copy of them"):
        load(tmp_path, SMALL, *both)
    with pytest.raises(FullshardError, match=r"home\.optimizer has no effect beside plan\.file; change the plan file instead"):
        load(tmp_path, SMALL, "plan=a.json", "home.optimizer=host")


def test_a_backlog_is_for_runs_without_clipping(tmp_path):
    given = ("home.optimizer=host", "home.backlog=8")
    recipe = load(tmp_path, SMALL, *given, "optim.clip=none")
    assert (recipe.home.backlog, recipe.optim.clip) == (8, None)
    assert Recipe.model_validate_json(recipe.model_dump_json(), strict=False) == recipe
    with pytest.raises(FullshardError, match=r"home\.backlog has no effect with optim\.clip: .* write optim\.clip = 'none'"):
        load(tmp_path, SMALL, *given)
    with pytest.raises(FullshardError, match=r"home\.backlog has no effect with plan\.compute = 'fp16'"):
        load(tmp_path, SMALL, *given, "optim.clip=none", "plan.compute=fp16")


def test_tokens_are_turned_into_steps(tmp_path):
    recipe = load(tmp_path, SMALL.replace("steps = 10", "tokens = 10_000"))
    assert recipe.steps == math.ceil(10_000 / (16 * 128))


@pytest.mark.parametrize("path", sorted(Path("recipes").glob("*.toml")), ids=lambda p: p.name)
def test_the_recipes_that_ship_are_valid(path):
    assert load_recipe(path, []).steps > 0


WRONG = {
    "optim.lrr=1": "unknown key optim.lrr (known: name, lr, betas, eps, momentum, weight_decay, decay_all, clip, options)",
    "optimizer.lr=1": "sample, checkpoint, profile, log); did you mean 'optim'?",
    "optim.moments=int8": "weight_decay, decay_all, clip, options); did you mean plan.moments?",
    "plan.names=layers.*": """plan.names = 'layers.*': input should be a list of strings, as in plan.names='["layers.*"]'""",
    "optim.betas=0.9": "optim.betas = 0.9: input should be a list of numbers, in brackets",
    "optim.lr=fast": "optim.lr = 'fast': input should be a valid number",
    "checkpoint.metric=loss": "metric has no effect without best",
    "checkpoint.best=1": "give eval.every, or checkpoint.metric = 'loss'",
    "checkpoint.evry=1": "did you mean 'every'?",
    "optim.lr=0": "optim.lr = 0: input should be greater than 0",
    "optim.lr=inf": "optim.lr = inf: input should be a finite number",
    "train.steps=1.5": "train.steps = 1.5: input should be a valid integer",
    "train.steps=-3": "train.steps = -3: input should be greater than 0",
    "train.tokens=5": "train: give either steps or tokens",
    "plan.strategy=zero4": "plan.strategy = 'zero4': input should be 'auto', 'ddp', 'zero1', 'zero2', 'zero3', 'hybrid',",
    "plan=zero4": "plan.strategy = 'zero4': input should be",
    "lora.alpha=8": "lora.rank is missing",
    "lora.rnk=8": "unknown key lora.rnk (known: rank, alpha, dropout, targets); did you mean 'rank'?",
    "data.packing=whole": "data: packing = 'whole' needs boundaries = 'labels' or 'attention'",
    "data.boundaries=some": "data.boundaries = 'some': input should be 'ignored', 'labels' or 'attention'",
    "eval.patience=2": "eval.patience has no effect without eval.every",
    "sample.every=5": "sample.every and sample.prompts belong together",
    "plan.compute=bf17": "plan.compute = 'bf17': input should be 'fp32', 'bf16' or 'fp16'",
    "schedule.kind=wsd": "schedule: kind = 'wsd' needs decay",
    "schedule.decay=3": "schedule: decay has no effect with kind = 'cosine'",
    "optim.momentum=0.9": "optim: momentum has no effect with name = 'adamw'; it takes betas, eps, weight_decay",
    "optim.options.foo=1": "optim: options has no effect with name = 'adamw'",
    "eval.every=5": "eval.every and data.valid belong together",
    "data.shuffle=maybe": "data.shuffle = 'maybe': input should be a valid boolean",
    "home.optimizer=moon": "home.optimizer = 'moon': input should be 'device', 'host' or 'disk'",
    "home.optimizer=disk": "home.optimizer = 'disk' needs disk.path, a directory on the disk that is to hold it",
    "home.params=disk": "home.params = 'disk' needs disk.path, a directory on the disk that is to hold it",
    "home.activations=disk": "home.activations = 'disk' needs disk.path, a directory on the disk that is to hold it",
    "home.activations=moon": "home.activations = 'moon': input should be 'device', 'host' or 'disk'",
    "home.optimiser=host": "did you mean 'optimizer'?",
    "home.staging=8": "home: staging has no effect with optimizer = 'device'; write optimizer = 'host'",
    "home.cpu_share=0.5": "home: cpu_share has no effect with optimizer = 'device'; write optimizer = 'host'",
    "home.backlog=8": "home: backlog has no effect with optimizer = 'device'; write optimizer = 'host'",
    "home.backlog=0": "home.backlog = 0: input should be greater than 0",
    "optim.clip=never": "optim.clip = 'never': input should be a valid number",
    "home.cpu_share=2.0": "home.cpu_share = 2.0: input should be less than or equal to 1",
    "disk.path=/tmp": "disk.path has no effect: nothing rests on disk; write home.optimizer = 'disk', or leave it out",
    "disk.pth=/tmp": "unknown key disk.pth (known: path); did you mean 'path'?",
    "profile.at=9": "profile.at = 9 with profile.steps = 3 ends at step 11, after the last of the run, 10; write a smaller",
    "profile.steps=2": "profile: steps has no effect without at",
    "optim": "'optim' is no override; write section.key=value",
    "lr=3": "'lr=3' is no override; write section.key=value",
    "optim.lr.x=3": "'optim.lr.x=3': lr is a value, not a section",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_mistake_is_one_sentence_that_names_the_key(tmp_path, override):
    with pytest.raises(FullshardError) as caught:
        load(tmp_path, 'plan = "zero3"\n' + SMALL, override)
    assert WRONG[override] in str(caught.value)
    assert "\n" not in str(caught.value)


CHECKPOINTS = {
    "keep=0 best=1": "best has no effect with keep = 0",
    "final=false export=true": "export needs final = true",
    "final=false minutes=0.0 keep=5": "there are no checkpoints",
}


@pytest.mark.parametrize("keys", CHECKPOINTS)
def test_keys_of_checkpoints_that_contradict_each_other(tmp_path, keys):
    with pytest.raises(FullshardError) as caught:
        load(tmp_path, SMALL, *(f"checkpoint.{key}" for key in keys.split()))
    assert CHECKPOINTS[keys] in str(caught.value)


def test_plan_file_and_choices_exclude_each_other(tmp_path):
    with pytest.raises(FullshardError, match="remat has no effect beside file"):
        load(tmp_path, SMALL, "plan.file=plan.json", "plan.remat=full")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (SMALL.replace('path = "tokens"', ""), "data: path is missing; add it, or source = 'file.py:callable'"),
        (SMALL.replace("[optim]\nlr = 1e-3", ""), "optim is missing; add it"),
        ("[model", "is not TOML"),
    ],
)
def test_broken_files(tmp_path, text, sentence):
    with pytest.raises(FullshardError) as caught:
        load(tmp_path, text)
    assert sentence in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(FullshardError, match=r"cannot read recipe .*: No such file"):
        load_recipe(tmp_path / "none.toml", [])


# -- schedules ----------------------------------------------------------------------------------------


def test_schedules_by_hand():
    assert [factor(s, 4, "constant", warmup=2) for s in range(4)] == [0.5, 1, 1, 1]
    assert [factor(s, 4, "linear") for s in range(4)] == [0.75, 0.5, 0.25, 0]
    assert [factor(s, 6, "linear", warmup=2, final=0.5) for s in range(6)] == [0.5, 1, 0.875, 0.75, 0.625, 0.5]
    assert [factor(s, 6, "wsd", warmup=1, decay=2, final=0.0) for s in range(6)] == [1, 1, 1, 1, 0.5, 0]
    half = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3, 4)]
    assert [factor(s, 4, "cosine") for s in range(4)] == pytest.approx(half)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_schedules_stay_between_final_and_one(kind):
    found = [factor(s, 50, kind, warmup=5, decay=10 if kind == "wsd" else 0, final=0.1) for s in range(50)]
    assert all(0 < f <= 1 for f in found)
    assert found[-1] == pytest.approx(1.0 if kind == "constant" else 0.1)
    assert sorted(found[5:], reverse=True) == found[5:]


@pytest.mark.parametrize("name", ["AdamW", "adamw", "ADAMW"])
def test_an_optimizer_is_the_same_in_upper_and_lower_case(tmp_path, name):
    from fullshard.plan.optimizer import AdamW
    from fullshard.runs.prepare.recipe_plan import make_optimizer

    recipe = load(tmp_path, SMALL, f"optim.name={name}")
    assert recipe.optim.name == "adamw"
    assert make_optimizer(recipe) == AdamW(lr=recipe.optim.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decay_all=False)


def test_a_recipe_records_only_what_its_optimizer_takes(tmp_path):
    def recorded(*overrides: str) -> dict:
        optim = json.loads(load(tmp_path, SMALL, *overrides).model_dump_json())["optim"]
        return {key: optim[key] for key in ("betas", "eps", "momentum", "weight_decay")}

    nothing = dict.fromkeys(("betas", "eps", "momentum", "weight_decay"))
    assert recorded() == nothing | {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert recorded("optim.name=SGD") == nothing | {"momentum": 0.0, "weight_decay": 0.1}
    assert recorded("optim.name=RMSprop") == nothing


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["schedule.warmup=20"], "schedule.warmup = 20 is longer than the run of 10 steps"),
        (["schedule.warmup=6", "schedule.kind=wsd", "schedule.decay=5"], "are more than the 10 steps"),
        (["optim.lr=-1.0"], "optim.lr = -1.0: input should be greater than 0"),
        (["optim.clip=0.0"], "optim.clip = 0.0: input should be greater than 0"),
    ],
)
def test_schedules_and_rates_that_cannot_be_meant_are_refused(tmp_path, overrides, sentence):
    with pytest.raises(FullshardError, match=re.escape(sentence)):
        load(tmp_path, SMALL, "train.steps=10", *overrides)
