"""Files of other systems become recipes: what each key means here, and none is dropped."""

import copy
import json
import tomllib

import pytest
import yaml

from fullshard.base.errors import FullshardError
from fullshard.runs.migrate import config_kinds
from fullshard.runs.migrate.config_kinds import migrate
from fullshard.runs.recipe.recipe import load_recipe
from tests.pure import migrations
from tests.pure.migrations import FILES

# What the files mean, read off the systems' own documentation.
MEANING = {
    "zero3_offload.json": {
        "plan.strategy": "zero3",
        "plan.compute": "fp16",
        "home.params": "host",
        "home.optimizer": "host",
        "schedule.kind": "linear",
        "optim.betas": [0.9, 0.999],
    },
    "llama_13b.json": {
        "plan.strategy": "zero3",
        "plan.compute": "bf16",
        "home.optimizer": "host",
        "optim.lr": 2e-5,
        "optim.betas": [0.9, 0.95],
        "optim.weight_decay": 0.1,
        "optim.clip": 1.0,
        "train.global_batch": 64,
        "train.micro_batch": 2,
        "train.steps": 100_000,
        "schedule.warmup": 2000,
        "schedule.final": 0.0,
    },
    "infinity.json": {
        "home.params": "disk",
        "home.optimizer": "disk",
        "disk.path": "/nvme_data",
        "train.micro_batch": 4,
        "train.global_batch": 32,  # on eight ranks
    },
    "cifar.json": {  # DeepSpeed's Adam is AdamW unless adam_w_mode is false
        "plan.strategy": "zero2",
        "home.optimizer": "host",
        "optim.name": "adamw",
        "optim.betas": [0.8, 0.999],
        "schedule.kind": "constant",
        "schedule.warmup": 1000,
        "train.global_batch": 4,
    },
    "zenflow.json": {"plan.strategy": "zero2", "home.optimizer": "host", "schedule.kind": "constant", "optim.lr": 2e-5},
    "fsdp1.yaml": {"plan.strategy": "zero3", "plan.compute": "bf16", "train.global_batch": 2},
    "fsdp2.yaml": {
        "plan.strategy": "hybrid",
        "plan.replicate": 2,
        "plan.tensor": 2,
        "plan.remat": "full",
        "train.global_batch": 4,  # a tensor axis reads the same data
    },
    "ddp.yaml": {"plan.strategy": "ddp", "train.global_batch": 8},
    "deepspeed.yaml": {"plan.strategy": "zero3", "plan.compute": "bf16", "train.global_batch": 64, "home.optimizer": "host"},
    "inline.yaml": {"plan.strategy": "zero3", "home.optimizer": "host", "optim.clip": 0.5, "train.global_batch": 16},
    "llama3_8b.toml": {
        "model.name": "llama3-8b",
        "data.sequence": 8192,
        "optim.lr": 3e-4,
        "schedule.kind": "linear",
        "schedule.warmup": 200,
        "schedule.final": 0.0,
        "plan.strategy": "zero3",
        "plan.compute": "bf16",
        "plan.remat": "selective",
        "train.steps": 1000,
        "log.tensorboard": True,
    },
    "debug_model.toml": {
        "plan.strategy": "zero2",
        "plan.remat": "full",
        "plan.remat_every": 2,
        "schedule.kind": "wsd",
        "schedule.decay": 5,
        "checkpoint.every": 10,
        "checkpoint.keep": 3,
        "checkpoint.background": True,
        "eval.every": 5,
        "eval.batches": 10,
        "data.valid": "FILL-IN",
    },
    "fsdp2.py": {
        "plan.strategy": "zero3",
        "plan.compute": "bf16",
        "plan.reduce": "fp32",
        "optim.name": "adam",
        "optim.lr": 0.01,
        "optim.weight_decay": 0.0,
        "optim.clip": 1.0,
        "train.seed": 0,
    },
    "fsdp1.py": {
        "plan.strategy": "zero2",
        "plan.compute": "bf16",
        "plan.reduce": "bf16",
        "home.params": "host",
        "home.optimizer": "host",
        "optim.weight_decay": 0.05,
        "optim.clip": "none",
        "train.micro_batch": 4,
    },
    "ddp.py": {
        "plan.strategy": "ddp",
        "plan.compute": "fp32",  # left out, it would be the device's fastest
        "optim.name": "sgd",
        "optim.lr": 1e-3,
        "optim.momentum": 0.9,
        "optim.weight_decay": 0.0,
    },
}
# What must be told of each, with a word of the reason.
LOST = {
    "zero3_offload.json": ("optimizer.params.lr", "Trainer"),
    "infinity.json": ("fp16.loss_scale", "dynamic"),
    "cifar.json": ("fp16.fp16_master_weights_and_grads", "fp32"),
    "zenflow.json": ("zero_optimization.zenflow.topk_ratio", "own step"),
    "llama3_8b.toml": ("training.dataset", "data pack --dataset allenai/c4"),
    "debug_model.toml": ("model.flavor", "no preset"),
    "fsdp2.py": ("set_modules_to_forward_prefetch", "plan.prefetch"),
    "fsdp1.py": ("AdamW.lr", "not in this file"),
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("migrate")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "zero.json").write_text(FILES["llama_13b.json"])
    return folder


@pytest.fixture
def drafts(monkeypatch):
    """The drafts that recipes were made from."""
    seen, finish = [], config_kinds.finish
    monkeypatch.setattr(config_kinds, "finish", lambda draft: (seen.append(draft), finish(draft)))
    return seen


def keys_of(text: str) -> dict:
    tree = tomllib.loads(text)
    return {f"{section}.{key}": value for section, table in tree.items() for key, value in table.items()}


def test_every_file_has_a_meaning():
    assert set(MEANING) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_a_recipe(here, name):
    found = keys_of(migrate(here / name).recipe)
    assert {key: found.get(key) for key in MEANING[name]} == MEANING[name]


@pytest.mark.parametrize("name", FILES)
def test_no_key_is_dropped_and_none_has_two_fates(here, name, drafts):
    migrate(here / name)
    (draft,) = drafts
    fates = [*draft.carried, *draft.idle, *draft.lost]
    assert sorted(fates) == sorted(draft.leaves)
    assert all(draft.idle.values())
    unknown = {key for key, why in draft.lost.items() if "unknown" in why}
    assert unknown == ({"zero_optimization.stage3_param_persitance_threshold"} if name == "infinity.json" else set())


@pytest.mark.parametrize("name", LOST)
def test_what_is_not_carried_over_is_told(here, name):
    made = migrate(here / name)
    key, why = LOST[name]
    for text in (made.report.partition("\nwithout effect")[0], made.recipe.partition("\n# without effect")[0]):
        (line,) = [line for line in text.partition("not carried over:")[2].splitlines() if f"{key} = " in line]
        assert why in line


@pytest.mark.parametrize("name", ["llama_13b.json", "fsdp1.yaml", "llama3_8b.toml"])
def test_an_unknown_key_is_told(tmp_path, name):
    text = FILES[name]
    planted = {"json": text.replace("{", '{"planted": 3, ', 1), "yaml": text + "planted: 3\n", "toml": "planted = 3\n" + text}
    (tmp_path / name).write_text(planted[name.partition(".")[2]])
    made = migrate(tmp_path / name)
    assert "planted = 3: this key is unknown" in made.report
    assert "# not carried over:" in made.recipe


ZEROPP = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}


@pytest.mark.parametrize(("precision", "wire"), [("bf16", ["int8", "int8", True]), ("fp16", [None, None, None])])
def test_quantised_traffic_of_zero_plus_plus(tmp_path, precision, wire):
    """The three keys of ZeRO++ and LoCo. fullshard quantises nothing where it computes in fp16, and says so."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({precision: {"enabled": True}, "zero_optimization": {"stage": 3, **ZEROPP}}))
    made = migrate(path)
    found = keys_of(made.recipe)
    assert [found.get(f"plan.{key}") for key in ("wire_gather", "wire_reduce", "error_feedback")] == wire
    assert ("only shards travel quantised here" in made.report) == (precision == "fp16")


def test_a_recipe_with_gaps_is_refused_and_values_fill_them(here, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(migrate(here / "llama_13b.json").recipe)
    with pytest.raises(FullshardError, match=r"model.name is still FILL-IN; write its value there, or model.name=VALUE"):
        load_recipe(path, [])
    with pytest.raises(FullshardError, match=r"data.path is still FILL-IN"):
        load_recipe(path, ["model.name=gpt2"])
    assert load_recipe(path, ["model.name=gpt2", "data.path=tokens"]).model.name == "gpt2"
    path.write_text(
        migrate(here / "llama_13b.json", overrides=["model.name=gpt2", "data.path=tokens", "train.tokens=1000000000"]).recipe
    )
    assert load_recipe(path, []).train.tokens == 1_000_000_000


def test_odd_arguments_of_a_script_are_told(tmp_path):
    text = FILES["ddp.py"].replace("lr=1e-3", "lr='fast', betas=3").replace("momentum=0.9", "momentum=[1], nesterov=True")
    (tmp_path / "odd.py").write_text(text.replace("SGD", "Adam"))
    made = migrate(tmp_path / "odd.py")
    assert keys_of(made.recipe)["optim.lr"] == 1e-4
    told = made.report.partition("not carried over:")[2]
    assert all(f"Adam.{key} = " in told for key in ("lr", "momentum", "nesterov"))


def test_the_number_of_ranks_gives_the_global_batch(here):
    assert keys_of(migrate(here / "infinity.json", ranks=2).recipe)["train.global_batch"] == 8
    assert keys_of(migrate(here / "llama3_8b.toml", ranks=64).recipe)["train.global_batch"] == 64


@pytest.mark.parametrize(
    ("name", "text", "kind", "says"),
    [
        ("a.json", '{"x": 1}', None, "has no key of DeepSpeed"),
        (
            "a.json",
            '{"optimizer": {}, "training": {}, "fp16": {}}',
            None,
            "DeepSpeed or torchtitan; write --kind deepspeed or torchtitan",
        ),
        ("a.json", "[]", None, "holds no table"),
        ("a.json", "{", None, "is not JSON"),
        ("a.yaml", "a: [", None, "is not YAML"),
        ("a.yaml", "a: &x [1, 2]\nb: [*x, *x]", None, "anchors"),
        ("a.toml", "a =", None, "is not TOML"),
        ("a.txt", "a", None, "ends in none of"),
        ("a.py", "print(1)", None, "calls neither"),
        ("a.py", "def", None, "is no Python script"),
        ("a.py", "a" + ".a" * 5000 + "()", None, "is no Python script"),
        ("a.py", migrations.TITAN_SCRIPT, None, "torchtitan's configuration in Python"),
        ("a.toml", "[model]\n[data]\n[optim]\n[train]\nx = 1", None, "is a recipe of fullshard already"),
        ("a.json", "{}", "horovod", "there is no kind 'horovod'"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', None, "no ZeRO stage"),
        ("a.yaml", "distributed_type: MEGATRON_LM", None, "no strategy here"),
        ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: gone.json}", None, "gone.json"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path, name, text, kind, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(FullshardError, match=says):
        migrate(tmp_path / name, kind)


@pytest.mark.parametrize("odd", [None, [], {}, "x", -1, 0, 1e300, True, [{"a": 1}], "\n# x"])
@pytest.mark.parametrize("name", ["llama_13b.json", "infinity.json", "inline.yaml", "fsdp2.yaml", "debug_model.toml"])
def test_odd_values_are_refused_or_carried(tmp_path, name, odd, monkeypatch):
    """Each value of a file replaced by an odd one: a recipe that loads, or a sentence."""
    monkeypatch.setattr(config_kinds, "parse_toml", lambda text, where: json.loads(text))
    text = FILES[name]
    tree = yaml.safe_load(text) if name.endswith("yaml") else tomllib.loads(text) if name.endswith("toml") else json.loads(text)
    kind = {"json": "deepspeed", "yaml": "accelerate", "toml": "torchtitan"}[name.partition(".")[2]]
    for path in _paths(tree):
        changed = copy.deepcopy(tree)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = odd
        (tmp_path / name).write_text(json.dumps(changed))
        try:
            migrate(tmp_path / name, kind)
        except FullshardError as error:
            assert len(str(error).splitlines()) == 1, path  # noqa: PT017


def _paths(tree: dict) -> list[tuple]:
    inner = [(key, *path) for key, value in tree.items() if isinstance(value, dict) for path in _paths(value)]
    return [*((key,) for key in tree), *inner]
