"""The example does what it says: its printed numbers are computed again by hand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIM, LAYERS, VOCAB, DEVICES = 64, 2, 256, 8
BLOCK = 4 * DIM * DIM + 3 * DIM * 4 * DIM + 2 * DIM
PARAMETERS = 2 * VOCAB * DIM + LAYERS * BLOCK + DIM


@pytest.mark.full
def test_the_example_prints_what_can_be_computed_by_hand(tmp_path):
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS",)}
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    env = kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "XLA_FLAGS": quick}
    command = [sys.executable, str(ROOT / "examples" / "on_jax.py"), "--steps=3"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    number = lambda pattern: int(re.search(pattern, text)[1].replace(",", ""))

    assert "\n8 cpu devices\n" in text
    assert number(r"parameters: ([\d,]+)") == PARAMETERS
    assert number(r"replicated: ([\d,]+) bytes on each of 8 devices") == 16 * PARAMETERS
    assert number(r"sharded: ([\d,]+) bytes on each, 87\.5% less") == 16 * PARAMETERS // DEVICES + 4  # Adam's count of steps

    weight = r"^model\.layers\.0\.mlp\.gate_proj\.weight +256 × 64 +\('shard', None\) +32 × 64$"
    assert re.search(weight, text, re.M)
    losses = [float(x) for x in re.findall(r"^  step \d  loss ([\d.]+)", text, re.M)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "the step was compiled 1 time\n" in text

    rows = re.findall(r"^(.*?)  +(\d×\d×\d) +([\d.]+ KiB) +([\d.]+ KiB) +([\d.]+)$", text, re.M)
    assert [mesh for _, mesh, *_ in rows] == ["1×8×1", "1×8×1", "1×8×1", "2×4×1", "1×4×2"]
    kib = lambda elements: f"{4 * elements / 1024:.2f} KiB"
    ends = 2 * VOCAB * DIM + DIM
    small = 2 * LAYERS * DIM  # the norms of blocks
    held = [PARAMETERS / 8, (PARAMETERS - ends) / 8 + ends, (PARAMETERS - small) / 8 + small, PARAMETERS / 4]
    assert [params for _, _, params, *_ in rows[:4]] == [kib(n) for n in held]
    assert all(abs(float(loss) - losses[0]) < 2e-6 for *_, loss in rows)

    assert "the compiled step moves what the schedule says" in text
    gathers = re.search(r"^model\.layers\.0 +([\d.]+ KiB) +([\d.]+ KiB) +([\d.]+ KiB) +([\d.]+ KiB)", text, re.M).groups()
    assert gathers == (kib(2 * BLOCK), kib(2 * BLOCK), kib(BLOCK), kib(BLOCK))
    assert list((tmp_path / "runs/examples/jax-profile").rglob("*.xplane.pb"))
