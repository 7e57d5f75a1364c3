"""Runs that diverge: what is saved stays good, and a run that rolls back goes on behind the batches that led there."""

import json
from pathlib import Path

import numpy as np
import pytest

from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.reader import Checkpoint
from fullshard.data import Batches, TokenFile
from fullshard.data.pack_tokens import pack
from tests.cpu import loop
from tests.cpu.test_train import RECIPE, metrics

# A model whose logits are NaN for some rows, told by a weighted sum of their tokens.
MODEL = """
import json
from pathlib import Path
import torch
from fullshard.on_torch.model.built_in import Llama
from fullshard.model.presets import LlamaSize

class Fragile(Llama):
    def forward(self, input_ids, *args, **kwargs):
        out = super().forward(input_ids, *args, **kwargs)
        sums = torch.tensor(json.loads(Path("bad.json").read_text()), device=input_ids.device)
        keys = (input_ids * torch.arange(1, input_ids.shape[-1] + 1, device=input_ids.device)).sum(-1)
        bad = (keys[:, None] == sums[None]).any(-1)
        return out + torch.where(bad, float("nan"), 0.0)[:, None, None]

def make():
    return Fragile(LlamaSize(dim=16, layers=1, heads=2, kv_heads=1, ffn=24, vocab=256, sequence=64))
"""
ROWS = 8  # of a step
OPTIONS = ["train.loss=plain", "train.max_skips=3", "checkpoint.every=2", "schedule.kind=constant", "schedule.warmup=0"]


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    pack(sorted(Path(json.__file__).parent.glob("*.py")), tmp_path / "tokens", workers=1)
    plant(tmp_path)
    return tmp_path


def plant(here: Path, *steps: int, rows: int = ROWS) -> None:
    """Make the loss of the samples that these steps of an undisturbed run take NaN."""
    source = Batches(TokenFile(here / "tokens"), 32, 1)
    sums = [int(np.dot(source.sample((s - 1) * rows)["input_ids"], np.arange(1, 33))) for s in steps]  # of each step a row
    (here / "bad.json").write_text(json.dumps(sums or [-1]))


def losses(run: Path) -> dict[int, float]:
    return {m["step"]: m["loss"] for m in metrics(run) if "loss" in m}


def events(run: Path) -> list[dict]:
    return [m for m in metrics(run) if m.get("event", "predicted") not in ("predicted", "kernels", "recipe changed")]


def finite(checkpoint_dir: Local) -> bool:
    """Whether all weights of all checkpoints are, read with numpy."""
    found = [Checkpoint(checkpoint_dir.child(name)) for name in commit.committed(checkpoint_dir)]
    return all(np.isfinite(c.tensor(n)).all() for c in found for n in c.manifest.tensors if n.startswith("model."))


@pytest.mark.quick(1)
@pytest.mark.parametrize("more", [[], ["checkpoint.background=false"], ["home.optimizer=disk", "disk.path=."]], ids=str)
def test_weights_that_are_not_finite_are_never_saved_over_good_ones(here, ranks, more):
    """A learning rate near the largest number of fp32: the first update makes weights infinite, after a step whose loss and
    gradient were not."""
    options = [*OPTIONS, *more, "checkpoint.every=1", "checkpoint.keep=2", "optim.name=sgd", "optim.weight_decay=100.0"]
    ranks(2).run(loop.run, str(here), [*options, "train.steps=4"], "wild")
    checkpoint_dir = Local(here / "runs/wild/checkpoints")
    assert commit.committed(checkpoint_dir) == ["step-00000003", "step-00000004"]
    for code, sentence in ranks(2).run(loop.ended, str(here), [*options, "train.steps=20", "optim.lr=3e38"], "wild", "auto"):
        assert code == 3, sentence
        assert "the checkpoint of step 5 was not saved: the weights in " in sentence
        assert sentence.endswith("step-00000004: lower optim.lr, or write train.on_divergence = 'rollback'")
    assert commit.committed(checkpoint_dir) == ["step-00000003", "step-00000004"]
    assert finite(checkpoint_dir)
    assert [e["event"] for e in events(here / "runs/wild")] == ["checkpoint failed", "diverged"]


def test_a_rolled_back_run_is_one_that_never_saw_the_bad_batches(here, ranks):
    """The oracle: a run of the steps up to the checkpoint, then one over the samples behind the skipped ones, by hand."""
    plant(here, 6, 7, 8)  # diverges at 8; the last checkpoint is of step 4
    options = [*OPTIONS, "train.steps=12", "train.on_divergence=rollback"]
    assert ranks(2).run(loop.ended, str(here), options, "rolled") == [(0, "")] * 2
    run = here / "runs/rolled"
    assert events(run) == [{"event": "rolled back", "step": 4, "diverged_at": 8, "skipped_samples": 4 * ROWS, "rollbacks": 1}]
    assert sorted(losses(run)) == list(range(1, 13))
    assert finite(Local(run / "checkpoints"))
    manifest = commit.read_manifest(Local(run / "checkpoints/step-00000012"))
    assert manifest.cursor == (12 + 4) * ROWS
    assert manifest.state["extra"]["rollbacks"] == 1
    wanted = ranks(2).run(loop.skipping, str(here), [*OPTIONS, "train.steps=12"], 4, 4)[0]
    assert list(losses(run).values()) == wanted
    plant(here)  # the bad batches are behind: what follows depends on the checkpoint alone
    for name in ["step-00000012"]:
        commit.remove(Local(run / "checkpoints"), name)
    ranks(2).run(loop.resume, str(here), options, "rolled")
    assert list(losses(run).values()) == wanted
    assert commit.read_manifest(Local(run / "checkpoints/step-00000012")).files == manifest.files


@pytest.mark.full
def test_other_ranks_roll_back_to_the_same_place(here, ranks):
    plant(here, 6, 7, 8)
    options = [*OPTIONS, "train.steps=12", "train.on_divergence=rollback"]
    for world in (1, 2):
        assert ranks(world).run(loop.ended, str(here), options, f"by{world}")[0] == (0, "")
    one, two = (here / f"runs/by{w}" for w in (1, 2))
    assert events(one) == events(two)
    assert list(losses(one).values()) == pytest.approx(list(losses(two).values()), rel=1e-5)


@pytest.mark.full
def test_rollbacks_that_do_not_help_come_to_an_end(here, ranks):
    """Every batch from step 6 on is bad: each rollback goes further back, and the last good state stays."""
    plant(here, *range(6, 60))
    options = [*OPTIONS, "train.steps=40", "train.on_divergence=rollback", "checkpoint.keep=0"]
    for code, sentence in ranks(2).run(loop.ended, str(here), options, "hopeless"):
        assert code == 3
        assert "again after it went back to step 2" in sentence
    assert events(here / "runs/hopeless")[-1]["event"] == "diverged"
    assert finite(Local(here / "runs/hopeless/checkpoints"))
    few = [*options, "train.max_rollbacks=1"]
    for code, sentence in ranks(2).run(loop.ended, str(here), few, "few"):
        assert code == 3
        assert "after train.max_rollbacks = 1; the last good checkpoint is" in sentence


def test_without_a_checkpoint_there_is_nothing_to_roll_back_to(here, ranks):
    plant(here, 1, 2, 3)
    for code, sentence in ranks(2).run(loop.ended, str(here), [*OPTIONS, "train.on_divergence=rollback"], "none"):
        assert code == 3
        assert "before its first checkpoint" in sentence
