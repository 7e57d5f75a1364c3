"""A GPU that is too full: the run ends with the planner's remedies. Run by hand:

python -m pytest tests/gpu/test_out_of_memory.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("typer")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROOM = 6 << 30  # bytes that the run finds free; the plan wants about four times that
RECIPE = """
[model]
name = "llama-125m"
[data]
path = "tokens"
sequence = 2048
[optim]
lr = 1e-4
[train]
steps = 2
global_batch = 32
micro_batch = 32
[plan]
compute = "bf16"
"""


@pytest.fixture
def full_device():
    """All memory but `ROOM` is taken, by this process: what another one sees of the device is the same."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * ROOM:
        pytest.skip("needs a GPU that is nearly empty")
    held = torch.empty(free - ROOM, dtype=torch.uint8, device="cuda")
    yield
    del held
    torch.cuda.empty_cache()


def test_out_of_memory_is_answered_with_what_would_help_and_what_it_costs(full_device, tmp_path):
    from fullshard.data.pack_tokens import pack

    (tmp_path / "recipe.toml").write_text(RECIPE)
    pack(sorted(Path(json.__file__).parent.parent.glob("*.py"))[:40], tmp_path / "tokens", workers=1)
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", "train", "recipe.toml", "--run", "run"],
        cwd=tmp_path,
        env=clean
        | {
            "CUDA_VISIBLE_DEVICES": "0",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = " ".join(done.stderr.split())
    assert done.returncode != 0, done.stdout[-500:]
    assert "out of memory in step 1" in said, said[-1500:]
    helps = said.split("what would help, the cheapest first:")[1]
    assert "Traceback" not in said
    costs = [0 if word == "no" else int(word.rstrip("%")) for word in re.findall(r"(no|\d+%) slower\)", helps)]
    assert len(costs) >= 3, helps
    assert costs == sorted(costs)
    assert "train.micro_batch = 16" in helps or "plan.remat" in helps
