"""A small benchmark in real ranks: a case that trains, one that runs out of memory, and going on afterwards."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """The real command, in a directory of its own."""
    where = tmp_path_factory.mktemp("bench")

    def call(*arguments: str) -> tuple[subprocess.CompletedProcess[str], dict]:
        command = [sys.executable, "-m", "fullshard", "bench", *arguments, "-o", "out"]
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        done = subprocess.run(command, cwd=where, env=kept, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        found = where / "out/bench.json"
        return done, json.loads(found.read_text()) if found.exists() else {}

    return call


# A rank of Llama 125M needs over a GiB. The limit of a CPU rank is approximate: memory that Python has freed can be used again,
# and OpenBLAS, torch's on ARM, ends the process where it cannot have its buffers.
CHOICES = ("model.name=llama-125m,llama-nano", "sequence=16", "home.optimizer=disk")
MATRIX = ("llama-nano", "--over", *CHOICES, "--limit", "500MiB", "--steps", "1")


@pytest.mark.full
def test_out_of_memory_is_a_row_and_the_rest_goes_on(bench):
    done, found = bench(*MATRIX)
    assert done.returncode == 0, done.stderr
    first, second = found["cases"]
    assert first["outcome"] == "out of memory", first
    assert "allocate" in first["why"]
    assert second["outcome"] == "ok", second
    # 6,736 parameters in fp32 are gathered twice and reduced once; ranks agree on tokens, and on norm and loss. Of two ranks each
    # sends half of what is gathered or reduced, and half each way of what is all-reduced.
    assert second["measured"]["sent"] == 3 * 4 * 6736 / 2 + 8 + 48
    assert second["measured"]["sent"] == second["predicted"]["sent"]
    assert "llama-125m: out of memory: " in done.stdout
    assert "MFU" not in done.stdout


@pytest.mark.full  # tests/pure has the same without ranks
def test_the_same_command_goes_on(bench):
    done, found = bench(*MATRIX)
    assert done.returncode == 0, done.stderr
    assert "2 cases on 2 ranks, 0 to run" in done.stderr
    assert done.stderr.count("from an earlier run") == 2
    assert [c["outcome"] for c in found["cases"]] == ["out of memory", "ok"]
