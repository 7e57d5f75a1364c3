"""`state.model.save_pretrained(dir)`: the files that the unsharded model's own writes, from any plan."""

import pytest
import torch

from fullshard.plan.plan import Home
from tests.cpu import saved_models
from tests.cpu.saved_models import Case

CASES = [
    Case(limit="10KB"),
    Case("qwen3", lora=True, home=Home("host", "host"), compute="bf16"),
    Case(strategy="zero1", compute="bf16", gathered=True),
    Case(tensor=2, compute="bf16"),
]
MORE = [
    Case("mixtral"),
    Case("gpt2", home=Home("disk", "disk"), compute="bf16"),
    Case("gpt2", strategy="ddp", compute="bf16", gathered=True),
    Case("gemma2", strategy="zero2", home=Home("device", "host"), compute="bf16", gathered=True),
    Case("mixtral", home=Home("host", "disk")),
    Case("qwen3", home=Home("host", "device"), compute="bf16", limit="5KB"),
]


def check(ranks: list[list[dict]], cases: list[Case]) -> None:
    for case, found, *others in zip(cases, *ranks, strict=True):
        assert found["apart"] == 0.0, case
        assert found["dtypes"] == {torch.float32}, case
        assert found["texts"] == [], case
        assert found["files"][0] == found["files"][1] > (1 if case.limit else 0), case
        assert found["gathers"] <= found["parameters"], case  # one at a time, each once
        assert all(not other["written"] for other in others), case


def test_files_are_those_of_the_unsharded_model(ranks, tmp_path):
    check(ranks(2).run(saved_models.all_beside_unsharded, CASES, str(tmp_path)), CASES)


@pytest.mark.full
def test_files_of_more_homes_and_strategies_are(ranks, tmp_path):
    check(ranks(2).run(saved_models.all_beside_unsharded, MORE, str(tmp_path)), MORE)


@pytest.mark.full
def test_files_from_four_ranks_in_two_groups_are(ranks, tmp_path):
    check(ranks(4).run(saved_models.all_beside_unsharded, [Case(tensor=2)], str(tmp_path)), [Case(tensor=2)])


def test_scalars_are_scalars_in_files(ranks, tmp_path):
    """CLIP's temperature, which is a vector of one element in the state."""
    first, _ = ranks(2).run(saved_models.files_with_a_scalar, str(tmp_path))
    assert first["shape"] == ()
    assert first["state"] == (1,)
    assert first["saved"] == first["exported"] == 0.0


def test_a_call_on_one_rank_is_a_sentence_within_seconds(ranks, tmp_path):
    for found in ranks(2).run(saved_models.on_one_rank, str(tmp_path)):
        assert "rank 1 did not call it within 0.5 seconds of rank 0" in found["alone"]
        assert "call it on all ranks, not under `if rank == 0`" in found["alone"]
        assert found["seconds"] < 60  # a loaded machine; seconds on another
        assert found["both"] == "accepted"


def test_arguments_are_the_librarys(ranks, tmp_path):
    first, second = ranks(2).run(saved_models.with_arguments, str(tmp_path))
    assert first["malformed"].startswith("ValueError")
    assert second["malformed"].startswith("FullshardError: rank 0: ValueError")
    assert first["distributed"] == second["distributed"]
    assert "leave distributed_checkpoint out" in first["distributed"]
    assert first["variant"] == first["sharded"] == first["whole"] == first["inner"] == 0.0


def test_other_libraries_save_as_they_do(ranks, tmp_path):
    first, second = ranks(2).run(saved_models.of_another_library, str(tmp_path))
    assert (first["returned"], second["returned"]) == (f"hub/{tmp_path}", None)
    for found in (first, second):
        assert found["kind"] == "OwnModel"
        assert found["equal"]
