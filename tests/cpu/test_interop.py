"""Sharded states in Hugging Face's Trainer, Accelerate and Lightning Fabric: two ranks train what one trains."""

from itertools import chain

import pytest
import torch

import fullshard as fs
from tests.cpu import interop

AWAY = fs.Home("host", "host")


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight."""
    return max(float((one[name] - tensor).abs().max()) for name, tensor in other.items())


def numbers(found: dict) -> list[float]:
    return [*chain(*found["logged"]), found["evaluated"]]


@pytest.mark.quick(1)
@pytest.mark.parametrize("own", [True, False], ids=["our optimizer", "its optimizer"])
def test_trainer_on_two_ranks_is_the_stock_trainer_on_one(ranks, tmp_path, own):
    stock = ranks(1).run(interop.stock_trainer, str(tmp_path / "stock"), own=own)[0]
    two = ranks(2).run(interop.trainer, str(tmp_path / "two"), own=own)
    for found in two:
        assert numbers(found) == pytest.approx(numbers(stock), abs=1e-6)
        assert far(found["weights"], stock["weights"]) < 1e-6
        assert found["steps"] == 6
    assert stock["logged"][0][0] > stock["logged"][-1][0] + 0.1  # it learns
    for found, whole in zip(ranks(2).run(interop.resumed, str(tmp_path / "two"), own=own), two, strict=True):
        assert far(found["weights"], whole["weights"]) == 0.0
        assert found["logged"] == whole["logged"]
        assert far(found["read"], whole["weights"]) == 0.0
        assert found["steps"] == 6


@pytest.mark.full
def test_trainer_with_everything_in_host_memory(ranks, tmp_path):
    one = ranks(1).run(interop.trainer, str(tmp_path / "one"))[0]
    for found in ranks(2).run(interop.trainer, str(tmp_path / "two"), home=AWAY):
        assert numbers(found) == pytest.approx(numbers(one), abs=1e-6)
        assert far(found["weights"], one["weights"]) < 1e-6


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("accelerate_loop", "zero3"),
        ("fabric_loop", "ddp"),
        pytest.param("accelerate_loop", "ddp", marks=pytest.mark.full),
        pytest.param("fabric_loop", "zero3", marks=pytest.mark.full),
    ],
)
def test_a_loop_on_two_ranks_is_plain_torch_on_one(ranks, tmp_path, name, strategy):
    plain = ranks(1).run(interop.by_hand)[0]
    assert plain["losses"][0] > plain["losses"][-1] + 0.03  # it learns
    found = ranks(1).run(interop.loop, name, str(tmp_path / "one"), strategy=strategy)
    for rank in found + ranks(2).run(interop.loop, name, str(tmp_path / "two"), strategy=strategy):
        assert rank["losses"] == pytest.approx(plain["losses"], abs=1e-6)
        assert far(rank["weights"], plain["weights"]) < 1e-6
        assert rank["again"] == rank["losses"][3:]
        assert far(rank["resumed"], rank["weights"]) == 0.0


REFUSED = {
    "mixed": "write fullshard.Precision(compute='bf16') in the plan",
    "fp16": "write compute='bf16' in the plan",
    "bare": "state.optimizer = yours",
    "remat": "write remat='full' in the plan",
    "batch": "per_device_train_batch_size = 3, but the plan has 2",
    "accumulate": "gradient_accumulation_steps = 2, but the plan has 1",
    "rate": "learning_rate = 1, but the state's optimizer has 0.001",
    "bf16": "write fullshard.Precision(compute='bf16') in the plan",
    "model": "leave model out",
    "reference": "pass ref_model=on_torch.shard(second, plan).model",
    "second": "accepted",
    "copied": "a sharded model cannot be copied by deepcopy",
    "precision": "write fullshard.Precision(compute='bf16') in the plan",
    "jointly": "fabric.setup_optimizers(strategy.sharded.optimizer)",
}


def test_what_contradicts_the_plan_is_refused_in_a_sentence(ranks, tmp_path):
    found = ranks(1).run(interop.refusals, str(tmp_path))[0]
    assert found.keys() == REFUSED.keys()
    for name, said in REFUSED.items():
        assert said in found[name], name
