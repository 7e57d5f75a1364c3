"""Dropout in a run: every data rank draws its own masks, from `train.seed`, and a resumed run draws those that follow."""

import json
from pathlib import Path

from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.reader import Checkpoint
from fullshard.data.pack_tokens import pack
from tests.cpu import dropout, loop
from tests.cpu.test_train import RECIPE, metrics

MODEL = """
from torch import nn

def make():
    drop = nn.Dropout(0.1)
    return nn.Sequential(nn.Embedding(256, 16), drop, nn.Sequential(nn.Linear(16, 16), drop, nn.GELU()), nn.Linear(16, 256))
"""


def test_data_ranks_draw_their_own_numbers_and_tensor_groups_the_same(ranks):
    first, second = ranks(2).run(dropout.draws, 3)
    assert first != second
    assert ranks(2).run(dropout.draws, 3) == [first, second]
    assert ranks(1).run(dropout.draws, 3) == [first]
    assert ranks(2).run(dropout.draws, 4)[0] != first
    assert ranks(2).run(dropout.draws, 3, tensor=2) == [first, first]


def test_a_checkpoint_restores_them_on_the_same_ranks_and_begins_anew_on_others(ranks, tmp_path):
    saved = ranks(2).run(dropout.save, str(tmp_path), 3)
    assert ranks(2).run(dropout.load, str(tmp_path), 9) == saved
    anew = ranks(1).run(dropout.load, str(tmp_path), 3)
    assert anew == ranks(1).run(dropout.draws, 3)
    assert ranks(2).run(dropout.load, str(tmp_path), 3, tensor=2) == anew * 2  # the ranks that saved had a batch each


def test_a_resumed_run_with_dropout_is_the_uninterrupted_one_to_the_bit(ranks, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    pack([Path(json.__file__).parent], tmp_path / "tokens", workers=1)
    options = [
        "checkpoint.every=2",
        "checkpoint.keep=0",
        "eval.every=2",
        "eval.batches=1",
        "data.valid=tokens",
        "train.loss=plain",
    ]
    ranks(2).run(loop.run, str(tmp_path), options, "run")
    checkpoint_dir = Local(tmp_path / "runs/run/checkpoints")
    whole, end = losses(tmp_path), files(checkpoint_dir)
    states = [bytes(Checkpoint(checkpoint_dir.child("step-00000006")).raw(f"rng.{rank:05d}.cpu")) for rank in range(2)]
    assert states[0] != states[1]
    for step in (4, 6):
        commit.remove(checkpoint_dir, commit.checkpoint_name(step))
    ranks(2).run(loop.resume, str(tmp_path), options, "run")
    assert losses(tmp_path) == whole
    assert files(checkpoint_dir) == end
    ranks(2).run(loop.run, str(tmp_path), [*options, "train.steps=2", "schedule.warmup=0"], "dry")
    assert metrics(tmp_path / "runs/dry")[0]["loss"] == whole[0]


def losses(here: Path) -> list[float]:
    return [m["loss"] for m in metrics(here / "runs/run") if "loss" in m]


def files(checkpoint_dir: Local) -> dict:
    """The checksums of every byte of the last state."""
    return commit.read_manifest(checkpoint_dir.child("step-00000006")).files
