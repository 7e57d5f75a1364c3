"""Profiles of real runs: planted faults are named, the numbers agree with the run's own clock, the files are whole."""

import json
from pathlib import Path

import pytest

from fullshard.observe.profile.profile_files import profile_text
from tests.cpu import loop

FILE = """
import time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from fullshard.on_torch import Loss

class Block(nn.Module):
    def __init__(self, width, lag=0.0):
        super().__init__()
        self.up, self.down, self.lag = nn.Linear(64, width), nn.Linear(width, 64), lag

    def forward(self, x):
        if self.lag and dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(self.lag)
        return x + self.down(F.relu(self.up(x)))

class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(6, 64), nn.ModuleList(blocks), nn.Linear(64, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.layers:
            x = block(x)
        return self.head(x)

def lagging():
    return Stack(Block(80), Block(80, lag=0.4), Block(80))

def wide():
    return Stack(Block(80), Block(80), Block(100_000), Block(80))

class Rows:
    def __len__(self):
        return 50

    def __getitem__(self, i):
        return {"x": torch.randn(6, generator=torch.Generator().manual_seed(i)), "y": i % 3}

class Slow(Rows):
    def __getitem__(self, i):
        time.sleep(0.1)
        return super().__getitem__(i)

def loss(model, batch):
    return Loss(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]), {})
"""
RECIPE = """
plan = "zero3"
[model]
name = "own.py:lagging"
[data]
source = "own.py:Rows"
objective = "custom"
workers = 0
[optim]
name = "sgd"
lr = 1e-3
[train]
steps = 5
global_batch = 8
micro_batch = 2
loss = "own.py:loss"
[checkpoint]
minutes = 0.0
final = false
[profile]
at = 3
steps = 2
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("profile")
    (path / "own.py").write_text(FILE)
    (path / "recipe.toml").write_text(RECIPE)
    return path


def test_a_slow_rank_is_named_with_its_unit(here, ranks):
    printed = ranks(2).run(loop.profiled, str(here), [], "lagging")
    directory = here / "runs/lagging/profile/step-3"
    text, found = profile_text(directory)
    slow = found["slowest"]
    assert (slow["rank"], slow["lane"], slow["unit"], slow["slow"]) == (1, "idle", "layers.1", True)
    assert slow["own_seconds"] - slow["others_seconds"] > 0.6  # two micro-batches with a lag each
    assert "rank 1 is slow" in text
    assert "the difference is idle time in unit layers.1" in text
    assert found["recommendation"]["change"].startswith("make rank 1 as fast as the others")
    assert found["ranks"][0]["lanes"]["communication"] > 0.6  # the other one waits for it
    assert {p.name for p in directory.iterdir()} >= {"rank-00000.trace.json.gz", "rank-00001.trace.json.gz", "report.txt"}
    assert "recommendation: make rank 1" in printed[0]
    assert "Memory block" not in "".join(printed)  # a warning of torch
    assert "profiler_st" not in "".join(printed)
    agrees_with_the_clock(here / "runs/lagging", found)
    assert profile_text(directory, traces=True)[0] == text


def agrees_with_the_clock(run: Path, found: dict) -> None:
    """The profile's steps last as long as those of the run's own metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line.get("step") in found["steps"] and "seconds" in line]
    assert found["steps"] == [3, 4]
    assert found["ranks"][0]["step_seconds"] == pytest.approx(sum(seconds) / len(seconds), rel=0.02, abs=0.01)
    for rank in found["ranks"]:
        assert sum(rank["lanes"].values()) == pytest.approx(rank["step_seconds"], abs=1e-9)


@pytest.mark.full
def test_an_exposed_gather_and_slow_data_are_named(here, ranks):
    ranks(2).run(loop.profiled, str(here), ["model.name=own.py:wide", "data.source=own.py:Slow"], "wide")
    text, found = profile_text(here / "runs/wide/profile/step-3")
    assert "the gather of unit layers.2 is the most exposed" in text
    gathers = {c["bytes"]: c["count"] for c in found["collectives"] if c["kind"] == "gather"}
    assert gathers[4 * (100_000 * 64 * 2 + 100_000 + 64)] == 4  # in forward and backward of two micro-batches
    assert "the step waits for data" in text
    assert all(rank["lanes"]["data"] > 0.4 for rank in found["ranks"])  # four rows of 0.1 s
    memory = found["memory"]["units"]["layers.2"]
    assert memory["params"] == 2 * (100_000 * 64 * 2 + 100_000 + 64)  # half of it, in fp32
    assert sum(memory.values()) > 0.9 * found["memory"]["bytes"]
    assert sum(n for row in found["memory"]["units"].values() for n in row.values()) == found["memory"]["bytes"]
