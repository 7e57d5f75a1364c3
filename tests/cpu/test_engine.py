"""What the engine does besides sharding, each against an oracle without it."""

import shutil

import pytest

from tests.cpu import engine

REFUSALS = {
    "another model": "unit embed: this model has no module 'transformer.wte'",
    "missing unit": "parameter model.norm.weight is in no unit of the plan",
    "tied apart": "units embed and head: model.embed_tokens.weight and lm_head.weight are one tied parameter",
    "home": "unit model.layers.1: home.params = 'disk' saves nothing while the optimizer's own copy",
    "root remat": "unit root: remat = 'full' would recompute the whole model",
    "integer": "odd is int8; only floating-point parameters can be sharded",
    "scalar": "odd is a scalar, which mesh.tensor = 2 does not take",
    "devices": "the plan is for 8 devices (1×8×1), but 2 ranks are running",
    "heads": "unit model.layers.0: model.layers.0.self_attn.q_proj has 3 heads, which mesh.tensor = 2 does not divide",
    "compile": "compile = true has no effect",
    "attention": "kernels.attention = 'cudnn' is a backend for GPUs, and this device is a CPU; write 'flash'",
    "kernel": "kernels.loss = 'fused' is a kernel for GPUs, and this device is a CPU; leave it out",
    "update": "kernels.update = 'torch' is for Adam and AdamW; leave it out, or train with one of them",
    "other attention": "kernels.attention = 'flash' has no effect on this LlamaForCausalLM, whose attention is 'eager'",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_honoured_is_refused_before_allocating(ranks, kind):
    for sentence, untouched in ranks(2).run(engine.refusal, kind):
        assert REFUSALS[kind] in sentence
        assert "\n" not in sentence
        assert untouched


def test_full_remat_keeps_less(ranks):
    none, full = (ranks(2).run(engine.saved_bytes, remat)[0] for remat in ("none", "full"))
    assert full < 0.5 * none


def test_what_is_recomputed(ranks):
    """Three blocks of seven products each: `full` redoes them (the last one is not needed), `selective` only the rest."""
    counts = {remat: ranks(2).run(engine.operators, remat)[0] for remat in ("none", "selective", "full")}
    (_, none), (_, selective), (_, full) = counts["none"], counts["selective"], counts["full"]
    assert selective["mm"] == none["mm"]
    assert full["mm"] == none["mm"] + 3 * 6
    assert "silu" not in none
    assert selective["silu"] == full["silu"] == 3


@pytest.mark.quick(1)
@pytest.mark.parametrize("remat", ["none", "full", "selective"])
def test_compiled_equals_eager_and_blocks_compile_once(ranks, remat):
    found = ranks(2).run(engine.compiled, remat)[0]
    assert found["error"] < 1e-6
    assert 1 <= found["frames"] <= 2  # three blocks share one compilation; a second for changed flags is fine


@pytest.mark.quick(2)
@pytest.mark.parametrize(("remat", "compile"), [("full", False), ("none", False), ("full", True), ("selective", False)])
def test_attention_is_computed_by_the_plans_backend_in_blocks_alone(ranks, remat, compile):
    found = ranks(2).run(engine.attention, remat, compile)[0]
    assert found["losses"]["flash"] == pytest.approx(found["losses"]["auto"], rel=1e-6)
    assert not any(found["inside"])
    assert len(found["inside"]) == (0 if compile else 9 if remat == "none" else 18)  # three blocks, three steps
    assert found["after"]
    assert found["kernels"]["attention"] == "flash (as planned)"


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPU")
def test_inductor(ranks):
    assert max(ranks(2).run(engine.inductor)) < 1e-5


def test_fp16_skips_overflows_and_trains(ranks):
    both = ranks(2).run(engine.half_precision)
    assert both[0] == both[1]
    assert 0 < both[0]["skipped"] < 30
    assert both[0]["scale"] < 2.0**40
    assert both[0]["last"] < both[0]["first"] - 0.1
    assert both[0]["norm"] < 100  # reported without the scale


def test_output_dtype(ranks):
    assert ranks(2).run(engine.output_dtype)[0] == ("torch.bfloat16", "torch.float32")


def test_outputs_that_the_next_unit_cannot_take_are_refused(ranks):
    found = ranks(2).run(engine.output_dtypes)[0]
    assert found["refused"] == found["impossible"]
    assert len(found["refused"]) == 4


def test_reduce_dtype(ranks):
    assert ranks(2).run(engine.reduce_dtype)[0] == {"torch.bfloat16"}


def test_evaluation_with_uneven_batches(ranks):
    for found, want in ranks(2).run(engine.uneven_evaluation):
        assert found == pytest.approx(want, rel=1e-6)


def test_generate_in_lockstep(ranks):
    for found, want in ranks(2).run(engine.samples):
        assert found == want


def test_hugging_face_generate_in_lockstep(ranks):
    for found, want in ranks(2).run(engine.hugging_face_generate):
        assert found == want


def test_dropout_is_the_same_when_recomputed(ranks):
    for none, full in ranks(2).run(engine.dropout):
        assert full == pytest.approx(none, rel=1e-6)


def test_a_step_without_labels_does_no_harm(ranks):
    assert ranks(2).run(engine.step_without_labels) == [(0.0, 0.0, True)] * 2


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("too few", "the plan accumulates 2 micro-batches a step, but 1 were given"),
        ("rows", "a batch of 4 × 8 tokens does not fit the plan's 2 × 8"),
        ("length", "a batch of 2 × 9 tokens does not fit the plan's 2 × 8"),
        ("keys", "a batch needs input_ids and labels; this one has tokens"),
    ],
)
def test_batches_that_do_not_fit_the_plan(ranks, kind, sentence):
    for found in ranks(2).run(engine.wrong_batch, kind):
        assert sentence in found
