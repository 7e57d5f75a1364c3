"""What a run says of its prediction."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fullshard.data.pack_tokens import pack
from fullshard.runs.prediction_check import FIRST, LAST, ThisHost, Verdict
from fullshard.runs.prepare.prepare import Prepared, prepare
from fullshard.runs.recipe.recipe import load_recipe

RECIPE = """
model.name = "llama-125m"
data = { path = "tokens", sequence = 128 }
optim.lr = 1e-3
train = { steps = 9, global_batch = 2 }
plan = { strategy = "zero3", compute = "fp32", compile = false, cluster = "2xh200" }
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Prepared:
    path = tmp_path_factory.mktemp("verdict")
    pack(sorted(Path(json.__file__).parent.glob("*.py")), path / "tokens", workers=1)
    (path / "recipe.toml").write_text(RECIPE)
    return prepare(load_recipe(path / "recipe.toml", [f"data.path={path / 'tokens'}"]), 2)


class Told:
    """A host that shows these shares one after the other, and as many seconds a step."""

    def __init__(self, *shares: float, seconds: float, between: bool = True):
        self.shares, self.seconds, self.between = list(shares), seconds, between

    measured = False

    def look(self) -> float:
        return self.shares.pop(0)

    def step(self, share: float) -> float:
        return share * self.seconds


def said(prepared: Prepared, seconds: float, host: Told, memory: dict[str, int]) -> tuple[str, Verdict]:
    assert prepared.estimate is not None
    verdict = Verdict(prepared.estimate, host)
    words = [verdict.add(9.0 if i + 1 < FIRST else seconds, memory) for i in range(LAST + 2)]
    assert [i + 1 for i, w in enumerate(words) if w] == [LAST]
    return words[LAST - 1] or "", verdict


def on_gpu(prepared: Prepared) -> dict[str, int]:
    assert prepared.estimate is not None
    return {"memory_allocated": prepared.estimate.device.allocated_bytes, "memory_reserved": 1}


def test_a_step_that_is_slow_because_the_host_is_is_no_wrong_prediction(prepared):
    predicted = prepared.estimate.step_seconds
    words, verdict = said(prepared, 1.5 * predicted, Told(*[1.6] * 6, seconds=0.925 * predicted), on_gpu(prepared))
    assert "with the host as it is, at 0.62 of the cluster's pace" in words
    assert "is off" not in words
    assert verdict.numbers["predicted_seconds"] == predicted
    assert verdict.numbers["predicted_with_this_host"] == pytest.approx(1.48 * predicted)
    assert verdict.numbers["host_share"] == 1.6


def test_a_step_that_neither_explains_is_one(prepared):
    predicted = prepared.estimate.step_seconds
    words, _ = said(prepared, 2 * predicted, Told(*[1.1] * 6, seconds=predicted), on_gpu(prepared))
    assert words.endswith("the predicted time is off; `fullshard measure` makes a cluster file of this machine for plan.cluster")
    timed = Told(*[1.1] * 6, seconds=predicted)
    timed.measured = True
    words, _ = said(prepared, 2 * predicted, timed, on_gpu(prepared))
    assert words.endswith("the predicted time is off; `fullshard measure` times this machine anew for plan.cluster")


def test_memory_that_is_off_asks_for_no_measurement_of_the_machine(prepared):
    """A cluster file holds seconds: it cannot change the bytes that are predicted."""
    predicted, fitting = prepared.estimate.step_seconds, on_gpu(prepared)
    more = fitting | {"memory_allocated": round(fitting["memory_allocated"] * 1.25)}
    words, _ = said(prepared, predicted, Told(*[1.02] * 6, seconds=0.98 * predicted), more)
    assert "host" not in words
    assert "fullshard measure" not in words
    assert "the predicted memory is 20% too low" in words
    words, _ = said(prepared, 2 * predicted, Told(*[1.0] * 6, seconds=predicted), more)
    assert "`fullshard measure` makes a cluster file" in words
    assert "the predicted memory is 20% too low" in words


def test_a_host_that_changes_is_looked_at_between_the_steps(prepared):
    """The middle of six looks; one after the last step alone, where updates run on under the next step."""
    shares = (1.0, 1.5, 1.5, 1.5, 1.4, 1.0)
    _, verdict = said(prepared, 1.0, Told(*shares, seconds=1.0), on_gpu(prepared))
    assert verdict.numbers["host_share"] == 1.45
    host = Told(*shares, seconds=1.0, between=False)
    _, verdict = said(prepared, 1.0, host, on_gpu(prepared))
    assert verdict.numbers["host_share"] == 1.0
    assert len(host.shares) == 5


def test_a_cpu_has_no_such_host_and_counts_no_bytes(prepared):
    verdict = Verdict(prepared.estimate, Told(seconds=1.0))  # a look would fail
    words = [verdict.add(prepared.estimate.step_seconds, {"memory_allocated": 5}) for _ in range(LAST)]
    assert words[-1] is not None
    assert "peak" not in words[-1]


def test_the_host_is_felt_without_a_change_of_what_is_drawn(prepared):
    """A real clock, of this machine's host: small kernels on a CPU stand for a GPU's. The planner's step follows it."""
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    host = ThisHost(prepared, SimpleNamespace(device=torch.device("cpu"), updates_overlap=False))
    share = host.look()
    seconds = host.step(share)
    assert torch.equal(torch.rand(4), expected)
    assert share > 0
    assert (seconds > prepared.estimate.step_seconds) == (share > 1)


@pytest.mark.parametrize(
    ("changes", "tuned"),
    [([], True), (["optim.clip=none"], False), (["home.staging=4"], False), (["home.cpu_share=0.5"], False)],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_offloaded_state_is_updated_in_the_fastest_way_unless_the_recipe_says_how(prepared, tmp_path, changes, tuned):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    long = ["model.name=llama-3.6b", "train.micro_batch=2", "plan.compute=bf16", "plan.remat=full", "home.optimizer=host"]
    given = [f"data.path={prepared.recipe.data.path}", *long, "train.global_batch=4", *changes]
    found = prepare(load_recipe(tmp_path / "recipe.toml", given), 2)
    assert (found.plan.staging > 4) == tuned
    assert found.estimate is not None
    assert found.estimate.fits
