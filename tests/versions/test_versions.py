"""The command line, the plan, the demo, a run and its checkpoint, on both engines. Runs in environments of their own, where only
what the extras declare is installed: `make test-versions`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [
    (),
    *[(c,) for c in ("models", "units", "plan", "explain", "compare", "measure", "train", "profile", "bench", "page")],
]
COMMANDS += [("migrate",), ("data", "pack"), ("checkpoint", "verify"), ("checkpoint", "export")]
SHORT = [
    "data.path=tokens",
    "train.global_batch=4",
    "train.micro_batch=2",
    "data.sequence=64",
    "sample.every=1000",
    "schedule.warmup=0",
]
PLAIN = {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def python(*arguments: str, cwd: Path) -> str:
    """What a Python process prints. It must succeed."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **PLAIN}, capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def fullshard(*arguments: str, cwd: Path) -> str:
    return python("-m", "fullshard", *arguments, cwd=cwd)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command: tuple[str, ...], tmp_path: Path) -> None:
    assert "--help" in fullshard(*command, "--help", cwd=tmp_path)


def test_plan(tmp_path: Path) -> None:
    """Options of each kind reach the plan: flags, numbers, choices, lists."""
    found = json.loads(fullshard("plan", "llama-125m", "--cluster", "2xh100", "--fix", "remat=full", "--json", cwd=tmp_path))
    assert {u["remat"] for u in found["plan"]["units"]} == {"none", "full"}
    hand = ["--devices", "4", "--strategy", "hybrid", "--replicate", "2", "--compute", "bf16", "--compile", "-o", "plan.json"]
    assert "bf16" in fullshard("plan", "llama-125m", *hand, cwd=tmp_path)
    assert "compile" in fullshard("explain", "plan.json", cwd=tmp_path)


def test_plan_of_a_hugging_face_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    assert "tokens/s" in fullshard("plan", ".", "--cluster", "2xcpu", "--sequence", "64", cwd=tmp_path)


def test_demo(tmp_path: Path) -> None:
    assert "import" in python(str(ROOT / "examples/demo.py"), "--steps", "2", "--rows", "1", "--sample", "3", cwd=tmp_path)


def test_a_run_goes_on_with_the_other_engine(tmp_path: Path) -> None:
    """Two steps with torch, two more with JAX from its checkpoint, and both checkpoints are whole."""
    (tmp_path / "text.txt").write_text("It was a bright cold day in April, and the clocks were striking thirteen.\n" * 200)
    fullshard("data", "pack", "text.txt", "-o", "tokens", cwd=tmp_path)
    recipe = [str(ROOT / "recipes/bytes.toml"), *SHORT, "--run", "run"]
    fullshard("train", *recipe, "train.steps=2", cwd=tmp_path)
    more = ["train.steps=4", "--resume", "auto", "--engine", "jax", "--accept-changes"]
    fullshard("train", *recipe, *more, cwd=tmp_path)
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if "loss" in event]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    fullshard("checkpoint", "verify", "run", cwd=tmp_path)
