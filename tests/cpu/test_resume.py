"""Runs that are interrupted and go on: what they log is what the uninterrupted run logs."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from fullshard import FullshardError, Plan
from fullshard.checkpoint import commit
from fullshard.checkpoint.directories import Local
from fullshard.checkpoint.reader import Checkpoint
from fullshard.checkpoint.verify import problems
from fullshard.data.pack_tokens import pack
from fullshard.model import presets
from fullshard.runs.resuming import resumable
from tests.command import fullshard_here
from tests.cpu import loop
from tests.cpu.test_train import MODEL, RECIPE, metrics

EVERY = ["checkpoint.every=2", "train.steps=8"]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    (path / "model.py").write_text(MODEL)
    (path / "recipe.toml").write_text(RECIPE)
    texts = sorted(Path(json.__file__).parent.glob("*.py"))
    pack(texts, path / "tokens", workers=1)
    pack(texts[:1], path / "valid", workers=1)
    return path


@pytest.fixture(scope="module")
def uninterrupted(here, ranks) -> list[dict]:
    ranks(2).run(loop.run, str(here), EVERY, "whole")
    return metrics(here / "runs/whole")


def losses(found: list[dict]) -> list[float]:
    return [m["loss"] for m in found if "loss" in m]


def cut(here: Path, name: str, step: int) -> None:
    """A copy of the whole run as if it had died after `step`, a line half written."""
    shutil.copytree(here / "runs/whole", here / "runs" / name)
    checkpoint_dir = Local(here / "runs" / name / "checkpoints")
    forget(checkpoint_dir, step)
    (checkpoint_dir.path / ".step-00000099.ab.partial").mkdir()
    with (here / "runs" / name / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(here, ranks, uninterrupted):
    assert commit.committed(Local(here / "runs/whole/checkpoints")) == ["step-00000006", "step-00000008"]  # keep = 2
    cut(here, "again", 6)
    ranks(2).run(loop.resume, str(here), EVERY, "again")
    assert losses(metrics(here / "runs/again")) == losses(uninterrupted)
    assert [m["step"] for m in metrics(here / "runs/again")] == list(range(1, 9))
    whole, again = (
        json.loads((here / f"runs/{n}/checkpoints/step-00000008/manifest.json").read_text()) for n in ("whole", "again")
    )
    assert whole["files"] == again["files"]  # the checksums of every byte of the end state
    assert whole["cursor"] == again["cursor"] == 64
    assert sorted(p.name for p in (here / "runs/again/checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


def test_a_resumed_run_keeps_the_precision_that_its_recipe_leaves_open(here, ranks, monkeypatch):
    """The first rank reads the checkpoint, and the others hear of it. On these devices fp32 would be chosen."""
    options = ["checkpoint.every=1", "train.steps=1", "schedule.warmup=0"]
    ranks(2).run(loop.run, str(here), [*options, "plan.compute=bf16"], "kept")
    assert ranks(2).run(loop.plan_to_resume, str(here), options, "kept") == [("bf16", "kept")] * 2
    assert ranks(2).run(loop.plan_to_resume, str(here), options, "none") == [("fp32", "chosen")] * 2
    assert Plan.load(here / "runs/kept/plan.json").precision.compute == "bf16"
    monkeypatch.chdir(here)
    assert "step-00000001 on 4 ranks" in resumable(here / "runs/kept", 4)


CHAIN = [(2, ["plan.strategy=ddp"], "2×1×1"), (1, [], "1×1×1"), (4, ["plan.strategy=hybrid", "plan.replicate=2"], "2×2×1")]


@pytest.mark.full
def test_other_ranks_and_strategies_go_on_to_rounding(here, ranks, uninterrupted):
    """zero3 on 4 ranks, ddp on 2, 1 rank, hybrid on 4: two steps each, the last checkpoint of one the first of the next."""
    options = ["checkpoint.every=2", "checkpoint.keep=0", "train.micro_batch=2", "train.steps=8"]
    ranks(4).run(loop.run, str(here), options, "long")
    wanted = losses(metrics(here / "runs/long"))
    assert wanted == pytest.approx(losses(uninterrupted), rel=1e-6)
    checkpoint_dir = Local(here / "runs/long/checkpoints")
    whole = tensors(checkpoint_dir)
    forget(checkpoint_dir, 2)
    meshes = [mesh(checkpoint_dir)]
    for step, (world, plan, _) in zip((4, 6, 8), CHAIN, strict=True):
        # steps stays 8, so that the schedule does: the run is ended by removing later checkpoints
        ranks(world).run(loop.resume, str(here), [*options, *plan], "long")
        assert losses(metrics(here / "runs/long")) == pytest.approx(wanted, rel=2e-6)
        forget(checkpoint_dir, step)
        meshes.append(mesh(checkpoint_dir))
    assert meshes == ["1×4×1", *(m for _, _, m in CHAIN)]
    for name, tensor in tensors(checkpoint_dir).items():  # weights and moments of the end
        np.testing.assert_allclose(tensor, whole[name], rtol=1e-4, atol=1e-5 * np.abs(whole[name]).max(), err_msg=name)


def forget(checkpoint_dir: Local, after: int) -> None:
    for name in commit.committed(checkpoint_dir):
        if commit.step_of(name) > after:
            commit.remove(checkpoint_dir, name)


def mesh(checkpoint_dir: Local) -> str:
    """Of the run that made the newest checkpoint."""
    return str(Plan.from_dict(commit.read_manifest(commit.find(str(checkpoint_dir))).plan).mesh)


def tensors(checkpoint_dir: Local) -> dict[str, np.ndarray]:
    found = Checkpoint(commit.find(str(checkpoint_dir)))
    return {n: found.tensor(n) for n in found.manifest.tensors if not n.startswith("rng.")}


def test_a_damaged_checkpoint_is_passed_over(here, ranks, uninterrupted):
    cut(here, "damaged", 8)
    file = next((here / "runs/damaged/checkpoints/step-00000008").glob("shard-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    ranks(2).run(loop.resume, str(here), EVERY, "damaged")
    assert losses(metrics(here / "runs/damaged")) == losses(uninterrupted)
    assert problems(Local(here / "runs/damaged/checkpoints/step-00000008")) == []  # written again


@pytest.mark.full
def test_the_best_by_evaluation_stay_and_early_stopping_goes_on(here, ranks):
    options = ["data.valid=valid", "eval.every=1", "eval.batches=1", "checkpoint.every=1", "checkpoint.keep=1"]
    options += [
        "checkpoint.best=1",
        "train.steps=3",
        "schedule.kind=constant",
        "optim.lr=3.0",
        "optim.clip=100.0",
    ]  # so fast that it gets worse
    ranks(2).run(loop.run, str(here), options, "best")
    found = {m["step"]: m["eval_loss"] for m in metrics(here / "runs/best") if "eval_loss" in m}
    best = min(found, key=found.get)
    assert best != 3
    kept = [commit.step_of(n) for n in commit.committed(Local(here / "runs/best/checkpoints"))]
    assert kept == [best, 3]
    manifest = commit.read_manifest(Local(here / f"runs/best/checkpoints/step-{3:08d}"))
    assert manifest.state["extra"]["best"] == found[best]
    assert manifest.state["extra"]["since_best"] == 3 - best


REFUSED = {
    "data.sequence=16": "data.sequence = 16, but the checkpoint has 32",
    "train.seed=1": "train.seed = 1, but the checkpoint has 0",
    "train.global_batch=16": "train.global_batch = 16, but the checkpoint has 8",
    "optim.name=sgd optim.momentum=0.9": 'optim.name = "sgd" here and "adamw" in the checkpoint',
    "optim.lr=1e-4": "optim.lr = 0.0001 here and 0.001 in the checkpoint: the losses to come would change",
    "train.steps=16": "train.steps = 16 here and 8 in the checkpoint",  # the cosine would rise again
    "plan.compute=bf16": 'the plan\'s precision.compute = "bf16" here and "fp32" in the checkpoint',
    "plan.wire_gather=int8": 'the plan\'s wire.gather = "int8" here and "plain" in the checkpoint',
    "plan.moments=int8": 'the plan\'s precision.moments = "int8" here and null in the checkpoint',
    "data.path=valid": "holds other tokens than the checkpoint was trained on",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_go_on_is_refused(here, ranks, uninterrupted, overrides):
    for sentence in ranks(2).run(loop.refused, str(here), [*EVERY, *overrides.split()], "whole"):
        assert REFUSED[overrides] in sentence
    assert metrics(here / "runs/whole") == uninterrupted


def test_what_cannot_go_on_is_refused_before_ranks_start(here, uninterrupted):
    def dry(*overrides: str, run: str = "whole"):
        options = ["--ranks=2", "--resume=auto", f"--run=runs/{run}", "--dry-run"]
        return fullshard_here("train", "recipe.toml", *EVERY, *overrides, *options, cwd=here)

    for overrides in ("data.sequence=16", "train.steps=16", "plan.moments=int8"):
        found = dry(overrides)
        assert (found.returncode, found.stdout) == (2, "")
        assert REFUSED[overrides] in found.stderr
    done = "it would be: no steps: all 8 are done in runs/whole/checkpoints/step-00000008"
    assert done in " ".join(dry().stderr.split())
    cut(here, "spoilt", 8)
    (here / "runs/spoilt/checkpoints/step-00000008/manifest.json").write_text("{")
    assert "steps 7 to 8 into runs/spoilt, from runs/spoilt/checkpoints/step-00000006" in dry(run="spoilt").stderr
    assert "8 steps into runs/none, weights drawn" in dry(run="none").stderr


def test_what_changes_the_curve_goes_on_where_it_is_accepted(here, ranks, uninterrupted):
    cut(here, "accepted", 6)
    ranks(2).run(loop.resume, str(here), [*EVERY, "optim.lr=1e-4"], "accepted", "auto", True)
    found = metrics(here / "runs/accepted")
    changed = {"event": "recipe changed", "step": 6, "key": "optim.lr", "old": 0.001, "new": 0.0001}
    assert [m for m in found if "event" in m] == [changed]
    assert losses(found)[:7] == losses(uninterrupted)[:7]  # the seventh is of weights from before
    assert losses(found)[7] != losses(uninterrupted)[7]
    for sentence in ranks(2).run(
        loop.refused, str(here), [*EVERY, "optim.name=sgd", "optim.momentum=0.9"], "whole", "auto", True
    ):
        assert "it lacks optimizer.model.embed_tokens.weight.momentum_buffer" in sentence


@pytest.mark.full
def test_more_steps_at_a_constant_rate_change_nothing(here, ranks):
    options = ["schedule.kind=constant", "checkpoint.every=2"]
    ranks(2).run(loop.run, str(here), [*options, "train.steps=6"], "constant")
    ranks(2).run(loop.run, str(here), [*options, "train.steps=4"], "longer")
    ranks(2).run(loop.resume, str(here), [*options, "train.steps=6"], "longer")
    assert losses(metrics(here / "runs/longer")) == losses(metrics(here / "runs/constant"))


def test_can_resume_says_yes_or_why_not_without_ranks(here, uninterrupted, monkeypatch):
    monkeypatch.chdir(here)
    said = resumable(Path("runs/whole"), 4)
    assert said == "runs/whole/checkpoints/step-00000008 on 4 ranks (1×4×1), and all its steps are done"
    with pytest.raises(FullshardError, match="is not a multiple of 6: 3 data ranks"):
        resumable(Path("runs/whole"), 3)
    with pytest.raises(FullshardError, match="is no run"):
        resumable(Path("runs"), 2)
    cut(here, "other", 0)
    with pytest.raises(FullshardError, match="has no checkpoint; the run would have to begin again"):
        resumable(Path("runs/other"), 2)
    cut(here, "wider", 8)
    Path("wider.py").write_text(MODEL.replace("dim=32", "dim=64"))
    recipe = Path("runs/wider/recipe.json")
    recipe.write_text(recipe.read_text().replace("model.py:make", "wider.py:make"))
    with pytest.raises(FullshardError, match=r"it has model\.\S+ \(F32 \[.*32\] instead of F32 \[.*64\]\)"):
        resumable(Path("runs/wider"), 2)


def test_two_runs_in_one_directory_are_refused(tmp_path):
    second = commit.lock_run(tmp_path, patience=0.3)
    with commit.lock_run(tmp_path), pytest.raises(FullshardError, match="another process trains into"):
        second.__enter__()
    with commit.lock_run(tmp_path, patience=0.0):
        pass


def test_the_end_of_a_run_is_exported(here, ranks):
    small = ["model.name=llama-bytes", "train.steps=1", "schedule.warmup=0", "data.sequence=16", "train.loss=plain"]
    ranks(2).run(loop.run, str(here), [*small, "checkpoint.export=true"], "exported")
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(here / "runs/exported/export")
    assert found.num_parameters() == presets.describe("llama-bytes").numel


# -- machines with disks of their own -----------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_has_lost_its_checkpoints_is_named_and_nothing_starts_over(here, ranks, tmp_path, lost):
    options = ["checkpoint.every=2", "train.steps=4", "schedule.kind=constant"]
    for rank in range(2):
        shutil.copytree(here, tmp_path / f"disk{rank}", ignore=shutil.ignore_patterns("runs"))
    assert ranks(2).run(loop.ended_on_own_disk, str(tmp_path), options, "own") == [(0, "")] * 2
    runs = [tmp_path / f"disk{rank}/runs/own" for rank in range(2)]
    shutil.move(runs[lost], tmp_path / "away")
    kept = contents(runs[1 - lost] / "checkpoints")
    more = [*options, "train.steps=6"]
    named = f"runs/own/checkpoints/step-00000004 is not on node-{lost}"
    for code, sentence in ranks(2).run(loop.ended_on_own_disk, str(tmp_path), more, "own", "auto"):
        assert (code, named in sentence) == (2, True), sentence
    for code, sentence in ranks(2).run(loop.ended_on_own_disk, str(tmp_path), more, "own"):  # without --resume
        assert (code, "holds checkpoints already" in sentence) == (2, True), sentence
    assert contents(runs[1 - lost] / "checkpoints") == kept
    shutil.rmtree(runs[lost], ignore_errors=True)
    shutil.move(tmp_path / "away", runs[lost])
    shutil.rmtree(runs[lost] / "checkpoints/step-00000004")  # one of several is lost: the others are still whole
    assert ranks(2).run(loop.ended_on_own_disk, str(tmp_path), more, "own", "auto") == [(0, "")] * 2
    assert [m["step"] for m in metrics(runs[0])] == [1, 2, 3, 4, 5, 6]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


# -- signals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 85)])
def test_all_ranks_end_with_the_code_of_the_signal_that_one_of_them_got(here, ranks, number, code):
    name = f"asked-{number}"
    assert ranks(2).run(loop.signalled, str(here), [], name, int(number), 3) == [code] * 2
    *_, last_step, last = metrics(here / "runs" / name)
    assert last == {"event": "stopped", "step": last_step["step"]}
    assert commit.committed(Local(here / "runs" / name / "checkpoints")) == [commit.checkpoint_name(last_step["step"])]


def test_a_run_that_was_done_when_the_signal_came_is_complete(here, ranks):
    assert ranks(2).run(loop.signalled, str(here), [], "done", int(signal.SIGTERM), 6) == [0, 0]
    assert [m["step"] for m in metrics(here / "runs/done")] == [1, 2, 3, 4, 5, 6]
