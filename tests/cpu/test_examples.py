"""The examples do what they say: each runs under a real torchrun, and its printed claims are read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SIZES = ["--layers=2", "--dim=32", "--heads=2", "--sequence=32", "--sample=8"]


def output(script: str, *arguments: str, cwd: Path, ranks: int = 2, quiet: bool = True) -> str:
    """What a script prints; with one rank it runs without a launcher. `quiet`: it must not warn."""
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launched}
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, *(TORCHRUN if ranks > 1 else []), str(ROOT / "examples" / script), *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=kept | alone, capture_output=True, encoding="utf-8", errors="replace", timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not quiet or "Warning" not in done.stderr, done.stderr  # a newcomer would wonder
    return done.stdout


def step_losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"^  step +\d+  loss ([\d.]+)", text, re.M)]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """Where the scripts work: they share their token files and the checkpoint."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.full
def test_basics_ends_at_the_loss_of_the_unsharded_model_with_half_its_bytes(here: Path):
    text = output("basics.py", "--steps=20", "--dim=32", cwd=here)
    sharded, whole = (float(x) for x in re.findall(r"^last loss, .*: ([\d.]+)$", text, re.M))
    assert sharded == pytest.approx(whole, abs=2e-6)
    assert step_losses(text)[0] > whole + 0.5
    for kind in ("params", "optimizer"):
        unsharded, rank = re.search(rf"^{kind} +([\d.]+) \w+ +([\d.]+) \w+$", text, re.M).groups()
        assert float(rank) == pytest.approx(float(unsharded) / 2, rel=0.01)


@pytest.mark.full
def test_the_transformer_learns_in_bf16_with_every_option_on(here: Path):
    text = output("transformer.py", *SIZES, "--steps=20", "--lr=1e-2", "--bf16", "--prefetch=2", "--remat", cwd=here)
    losses = step_losses(text)
    unseen = float(re.search(r"not seen: ([\d.]+)", text)[1])
    assert losses[0] == pytest.approx(5.545, abs=0.1)  # log 256: it knows nothing yet
    assert losses[-1] < 4
    assert unseen < 4.5
    assert "compute bf16, reduce fp32, master fp32" in text
    assert re.search(r"layers.0 … layers.1 \(2\) +sharded +end of forward +full", text)
    assert "it continues 'def ': 'def " in text


@pytest.mark.full
def test_a_resumed_run_is_the_uninterrupted_one_and_the_export_is_the_model(here: Path):
    text = output("checkpointing.py", "--save=point", "--steps=6", cwd=here)
    saved = step_losses(text)
    assert len(saved) == 6
    plain, sharded = re.search(r"plain torch ([\d.]+), of the sharded model ([\d.]+)", text).groups()
    assert float(plain) == pytest.approx(float(sharded), abs=2e-6)
    resumed = output("checkpointing.py", "--resume=point", "--steps=6", cwd=here)
    assert step_losses(resumed) == saved[3:]
    assert "uninterrupted run: 0.0e+00 over 3 steps" in resumed
    alone = output("checkpointing.py", "--resume=point", "--steps=6", "--strategy=ddp", cwd=here, ranks=1)
    assert step_losses(alone) == pytest.approx(saved[3:], abs=3e-6)
    assert "mesh.shard: 2 → 1" in alone


@pytest.mark.full
def test_memory_falls_from_plan_to_plan_and_the_loss_stays(here: Path):
    text = output("memory_efficient.py", "--steps=4", "--sequence=128", cwd=here)
    found = re.findall(r"^(.+?)  +\d × \d +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+ +([\d.]+)$", text, re.M)
    rows = {name: [float(x) for x in numbers] for name, *numbers in found}
    assert len(rows) == 9
    params, gradients, optimizer = rows["ddp"][:3]
    assert params == gradients == pytest.approx(optimizer / 2, abs=0.02)
    for name in rows.keys() - {"ddp"}:
        assert rows[name][:3] == pytest.approx([params / 2, gradients / 2, optimizer / 2], abs=0.02)
    peaks = {name: numbers[3] for name, numbers in rows.items()}
    assert peaks["ddp"] > peaks["zero1"] > peaks["zero2"] > peaks["zero3"]
    savings = ["zero3, smaller micro-batches", "zero3, bf16", "zero3, remat", "zero3, chunked loss"]
    assert all(peaks["all of these"] < peaks[name] < peaks["zero3"] for name in savings)
    losses = {name: numbers[4] for name, numbers in rows.items()}
    in_bf16 = {"zero3, bf16", "all of these"}
    assert all(losses[name] == pytest.approx(losses["ddp"], abs=2e-6) for name in losses.keys() - in_bf16)
    assert all(losses[name] == pytest.approx(losses["ddp"], abs=1e-2) for name in in_bf16)


@pytest.mark.full
@pytest.mark.parametrize("script", ["hf_trainer.py", "accelerate_loop.py", "fabric_loop.py"])
def test_the_loops_of_other_libraries_print_the_losses_of_one_rank(here: Path, script: str):
    two = step_losses(output(script, "--steps=3", "--output=two", cwd=here, quiet=False))
    assert len(two) == 3
    assert two == pytest.approx(
        step_losses(output(script, "--steps=3", "--output=one", cwd=here, ranks=1, quiet=False)), abs=2e-6
    )
