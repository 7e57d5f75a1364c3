"""Hugging Face models shard, train and match their unsharded selves with no edit to the model."""

import pytest
import torch

import fullshard as fs
from fullshard import on_torch
from fullshard.planner.memory.peak_memory import predict
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


@pytest.mark.quick(1)
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


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_compiled_float8_blocks_save_attentions_output_alone(kv_heads):
    """By hand: the inputs of q, k and v, of gate and up, and of down are computed again. That of o is a view of attention's
    output, which attention saves for its own backward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=kv_heads, vocab_size=512))
    described = on_torch.describe(model, micro_batch=2, sequence=128, compute="bf16")
    kinds = (fs.Precision("bf16", float8=kind) for kind in (None, "rowwise"))
    plans = [fs.ddp(described, devices=1, precision=p, batch=fs.Batch(2, 128), compile=True) for p in kinds]
    plain, rounded = (predict(plan, described, loss="plain", reserved=False) for plan in plans)
    assert plain.phase == rounded.phase
    assert plain.allocated - rounded.allocated == 4 * 2 * (2 * 128) * (64 + 64 + 192)
