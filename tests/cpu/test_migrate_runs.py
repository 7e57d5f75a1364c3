"""A migrated configuration of each kind trains: two ranks, a few steps, with the sizes of a laptop."""

import json
import math
import tomllib

import pytest

from fullshard.data.pack_tokens import pack
from fullshard.runs.migrate.config_kinds import migrate
from tests.cpu import recipes
from tests.pure.migrations import FILES

# Only sizes, model and data: what a file chooses stays as it is.
SMALL = ["model.name=models.py:llama", "data.path=bytes", "data.sequence=32", "train.steps=6", "train.micro_batch=2"]
SMALL += ["train.global_batch=8", "schedule.warmup=1", "optim.lr=2e-3"]
ON_DISK = ["disk.path=offloaded", "plan.compute=bf16"]
RUNS = {
    "llama_13b.json": ("zero3", []),
    "infinity.json": ("zero3", ON_DISK),
    "cifar.json": ("zero2", ["plan.compute=bf16"]),
    "fsdp1.yaml": ("zero3", []),
    "ddp.yaml": ("ddp", []),
    "inline.yaml": ("zero3", []),
    "fsdp2.yaml": ("zero3", ["plan.strategy=zero3", "plan.replicate=1", "plan.tensor=1"]),  # it is for eight ranks
    "llama3_8b.toml": ("zero3", ["log.tensorboard=false"]),
    "debug_model.toml": ("zero2", ["data.valid=bytes", "eval.every=3", "eval.batches=1", "schedule.decay=2"]),
    "fsdp1.py": ("zero2", []),
    "fsdp2.py": ("zero3", []),
    "ddp.py": ("ddp", ["optim.lr=0.1"]),
}
FIRST = {"llama_13b.json"}  # in `make test`: offload, bf16, a schedule and clipping


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("migrated")
    (folder / "text.txt").write_text(json.dumps(sorted(FILES.values())) * 3)
    pack([folder / "text.txt"], folder / "bytes", workers=1)
    (folder / "offloaded").mkdir()
    (folder / "models.py").write_text(recipes.MODELS)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FIRST else pytest.mark.full) for n in RUNS])
def test_a_migrated_configuration_trains(ranks, here, name):
    strategy, more = RUNS[name]
    recipe = here / f"{name}.recipe.toml"
    recipe.write_text(migrate(here / name, overrides=[*SMALL, *more]).recipe)
    ranks(2).run(recipes.run_only, here, recipe, here / "runs" / name)
    lines = [json.loads(line) for line in (here / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert tomllib.loads(recipe.read_text())["plan"]["strategy"] == strategy
    assert len(losses) == 6
    assert losses[0] == pytest.approx(math.log(384), abs=0.3)  # it knows nothing of its 384 tokens
    assert losses[-1] < losses[0]
