"""A machine that has only JAX trains: a new environment, installed with `pip install 'fullshard[jax]'`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = """
[model]
name = "llama-bytes"
[data]
path = "tokens"
sequence = 32
[plan]
strategy = "zero3"
[optim]
lr = 1e-3
[train]
steps = 4
global_batch = 4
micro_batch = 2
"""


@pytest.mark.full
def test_an_environment_without_torch_trains(tmp_path):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS")}
    run = lambda *line: subprocess.run(line, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=600)
    assert run(sys.executable, "-m", "venv", "only-jax").returncode == 0
    python = str(tmp_path / "only-jax" / "bin" / "python")
    options = ("--quiet", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt"))
    installed = run(python, "-m", "pip", "install", *options, f"{ROOT}[jax]")
    assert installed.returncode == 0, installed.stderr
    assert "No module named 'torch'" in run(python, "-c", "import torch").stderr
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("a text of some letters, again and again. " * 400)
    fullshard = (python, "-m", "fullshard")
    packed = run(*fullshard, "data", "pack", "text.txt", "-o", "tokens")
    assert packed.returncode == 0, packed.stderr
    trained = run(*fullshard, "train", "recipe.toml", "--run", "run", "--engine", "jax", "--ranks", "2")
    assert trained.returncode == 0, trained.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    refused = run(*fullshard, "train", "recipe.toml", "--run", "other")
    assert refused.returncode == 2
    assert "pip install 'fullshard[torch]'" in refused.stderr
