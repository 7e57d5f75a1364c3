"""Hugging Face models shard, train and match their unsharded selves with no edit to the model."""

import pytest

from tests.cpu import hugging_face
from tests.cpu.parity import Case

MODELS = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "mixtral"]
SPLIT = ["llama", "qwen2", "qwen3", "gemma2", "gemma3"]  # Llama-like: the tensor axis knows them
ALIKE = {"qwen2", "qwen3", "gemma2"}  # to others: on four ranks they are in the whole matrix only
# A bias on keys shifts every score of a query alike, so its gradient is nothing but rounding.
NO_GRADIENT = ("k_proj.bias", "c_attn.bias")


def on_four(names: list[str]) -> list:
    return [pytest.param(n, marks=pytest.mark.full) if n in ALIKE else n for n in names]


def check(found: dict) -> None:
    assert found["loss"] <= 1e-6, found
    assert found["norm"] <= 2e-6, found
    worst = max((v, n) for n, v in found["params"].items() if not n.endswith(NO_GRADIENT))
    assert worst[0] <= 2e-5, worst
    assert found["whole"] <= 2e-6, found["whole"]


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MODELS)
def test_matches_unsharded(ranks, name):
    for found in ranks(2).run(hugging_face.errors, name, Case("zero3", remat="full", accumulate=2)):
        check(found)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", on_four(MODELS))
def test_matches_unsharded_on_a_hybrid_mesh(ranks, name):
    for found in ranks(4).run(hugging_face.errors, name, Case("hybrid", {"replicate": 2, "shard": 2})):
        check(found)


@pytest.mark.parametrize("name", on_four(SPLIT))
def test_tensor_axis_matches_unsharded(ranks, name):
    for found in ranks(4).run(hugging_face.errors, name, Case("zero3", {"tensor": 2}, clip=0.1)):
        check(found)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_what_the_tensor_axis_cannot_split_is_refused(ranks, name):
    found = ranks(2).run(hugging_face.refusal, name, Case("zero3", {"tensor": 2}))[0]
    assert found.startswith("unit "), found
    assert "no tensor-parallel layout" in found
    assert "use tensor = 1" in found


def test_weights_with_values_keep_them(ranks):
    found = ranks(2).run(hugging_face.keeps_values)[0]
    assert max(found.values()) == 0.0


def test_oracle_is_not_trivial(ranks):
    """Training moves the weights far beyond the tolerances above."""
    moved = ranks(2).run(hugging_face.movement, "llama")[0]
    assert min(moved.values()) > 1e-4, moved


def test_lora_on_hugging_face(ranks):
    for found in ranks(2).run(hugging_face.errors, "llama", Case("zero3", remat="full"), lora=True):
        check(found)
