"""Models of any kind, batches of any kind and losses of one's own: sharded equals unsharded."""

import pytest
import torch

import fullshard as fs
from fullshard import on_torch
from tests.cpu import any_model, odd_models
from tests.cpu.any_model import KINDS

T5 = pytest.param("t5", marks=pytest.mark.oldest_torch)  # whose `shared` does not run in its unit
MARKED = [T5 if kind == "t5" else kind for kind in KINDS]


@pytest.mark.quick(5)
@pytest.mark.parametrize("strategy", ["zero3", "hybrid"])
@pytest.mark.parametrize("kind", MARKED)
def test_sharded_is_unsharded(ranks, kind, strategy):
    for found in ranks(2).run(any_model.compared, kind, strategy):
        assert found["loss"] < 1e-6
        assert found["accuracy"] < 1e-9
        assert found["weights"] < 1e-6
        assert found["moved"] > 1e-3


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", MARKED)
def test_an_own_loop_is_unsharded(ranks, kind):
    for found in ranks(2).run(any_model.compared, kind, "zero3", own=True):
        assert found["loss"] < 1e-6
        assert found["weights"] < 1e-6


@pytest.mark.parametrize("kind", ["mlp", "unet", T5])
def test_counts_that_differ_between_micro_batches(ranks, kind):
    """The first micro-batch's count is taken for all until the last is counted."""
    for found in ranks(2).run(any_model.compared, kind, "zero3", accumulate=2):
        assert found["loss"] < 1e-6
        assert found["accuracy"] < 1e-9
        assert found["weights"] < 1e-6


def test_small_tensors_of_a_block_stay_whole(ranks):
    """The norms of a block are a unit of their own, which every rank has whole."""
    for found in ranks(2).run(any_model.compared, "qwen3_moe", "zero3", small=20):
        assert found["loss"] < 1e-6
        assert found["weights"] < 1e-6
    described = on_torch.describe(any_model.build("qwen3_moe"), small=20)
    plan = fs.zero3(described, devices=2)
    (unit,) = [u for u in plan.units if u.name == "model.layers.0.small"]
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.k_norm", "self_attn.q_norm"]
    assert sorted(m.removeprefix("model.layers.0.") for m in unit.modules) == norms
    assert unit.layout == "replicated"
    with pytest.raises(fs.FullshardError, match="small = 2 has no effect"):
        on_torch.describe(any_model.build("qwen3_moe"), small=2)


def test_a_parameter_that_another_module_computes_with(ranks):
    for own in (False, True):
        for sentence in ranks(2).run(any_model.refusal, "borrowing", own):
            assert "`return SimpleNamespace(logits=x @ self.embed.weight.T)` computes with embed.weight outside" in sentence
            assert "on_torch.describe(model, example=batch, loss=loss, costs=False)" in sentence
            assert "plan.change('embed', reshard=False), or strategy zero2" in sentence
    for strategy, how in (("zero3", {"keep": "embed"}), ("zero2", {}), ("zero3", {"shown": True})):
        for found in ranks(2).run(any_model.compared, "borrowing", strategy, **how):
            assert found["loss"] < 1e-6
            assert found["weights"] < 1e-6


@pytest.mark.oldest_torch
@pytest.mark.quick(12)
@pytest.mark.parametrize("kind", [*odd_models.PLAIN, *odd_models.SHOWN])
def test_parameters_that_are_used_where_fsdp_does_not_expect_it(ranks, kind):
    """Containers, weights that other modules read, modules that are called past their hooks, frozen modules."""
    for found in ranks(2).run(any_model.compared, kind, "zero3", shown=kind in odd_models.SHOWN):
        assert found["loss"] < 1e-6
        assert found["weights"] < 1e-6
        assert found["moved"] > 1e-3


HOST, DISK, STATE_AWAY = fs.Home("host", "host"), fs.Home("disk", "disk"), fs.Home(optimizer="host")


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("zero3", {"home": DISK}),
        ("zero3", {"home": HOST, "accumulate": 2}),
        ("zero1", {"accumulate": 2}),
        ("ddp", {"home": STATE_AWAY}),
    ],
)
@pytest.mark.parametrize("kind", ["scalar_parameters", "empty_parameter"])
def test_units_of_which_a_rank_has_nothing(ranks, kind, strategy, how):
    """Of two ranks one has no part of a scalar, and none has a part of an empty parameter."""
    for found in ranks(2).run(any_model.compared, kind, strategy, **how):
        assert found["loss"] < 1e-6
        assert found["weights"] < 1e-6


@pytest.mark.parametrize("home", [HOST, DISK])
def test_a_checkpoint_of_units_of_which_a_rank_has_nothing(ranks, home, tmp_path):
    for uninterrupted, resumed in ranks(2).run(any_model.resumed, "scalar_parameters", home, str(tmp_path / "saved")):
        assert uninterrupted == resumed


KEPT = [(strategy, home) for strategy in ("zero2", "zero1", "ddp") for home in (None, STATE_AWAY)]
SHARDED = [(strategy, home) for strategy in ("zero3", "hybrid") for home in (None, STATE_AWAY, HOST, DISK)]


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "home"), [*KEPT, *SHARDED])
@pytest.mark.parametrize("kind", [*odd_models.PLAIN, *odd_models.SHOWN])
def test_odd_models_under_every_strategy_and_home(ranks, kind, strategy, home):
    for found in ranks(2).run(any_model.compared, kind, strategy, home=home, shown=kind in odd_models.SHOWN):
        assert found["loss"] < 1e-6
        assert found["weights"] < 1e-6


@pytest.mark.parametrize("kind", odd_models.SHOWN)
def test_a_plan_that_saw_no_batch_is_told_to_look_at_one(ranks, kind):
    for own in (False, True):
        for sentence in ranks(2).run(any_model.refusal, kind, own):
            assert "outside the forward of its module, when it is sharded; let a batch show it to the plan" in sentence


def test_a_buffer_in_another_dtype_than_the_plan_computes_in(ranks):
    half = fs.Precision(compute="bf16")
    for own in (False, True):
        for sentence in ranks(2).run(any_model.refusal, "mixed_buffer", own, precision=half):
            assert "`return super().body(x @ self.rotation)` computes with two dtypes" in sentence
            assert "buffers such as rotation keep their own; cast them: Precision(buffers='bf16')" in sentence
    half = fs.Precision(compute="bf16", buffers="bf16")
    assert ranks(2).run(any_model.refusal, "mixed_buffer", True, precision=half) == ["trained", "trained"]


def test_a_block_that_changes_its_input_in_place(ranks):
    for own in (False, True):
        for sentence in ranks(2).run(any_model.refusal, "input_in_place", own):
            assert "`x += 1` changes in place what a unit was given, which FSDP does not allow; write it out of place" in sentence


def test_a_model_with_a_backward_of_its_own(ranks):
    for sentence in ranks(2).run(any_model.refusal, "own_backward", False):
        assert "`again = x + ctx.block.mix(x)` is computed in a backward of the model's own, in which FSDP gathers no" in sentence


BERT = {
    "*.query": "output",
    "*.key": "output",
    "*.value": "output",
    "*.intermediate.dense": "output",
    "*.layer.*.output.dense": "input",
    "*_embeddings": "whole",
    "cls.*": "whole",
}


@pytest.mark.full
def test_a_tensor_axis_by_patterns(ranks):
    """BERT has none of Llama's names."""
    for world in (2, 4):
        for found in ranks(world).run(any_model.compared, "bert", "zero3", tensor=2, split=BERT):
            assert found["loss"] < 1e-6
            assert found["weights"] < 1e-6
    described = on_torch.describe(any_model.build("bert"))
    plan = fs.zero3(described, devices=4, tensor=2, split=BERT)
    assert fs.Plan.from_json(plan.to_json()) == plan
    assert "*.query by output" in str(plan)
    with pytest.raises(fs.PlanError, match=r"split: \*.query must be one of output, input, vocabulary, whole, not 'columns'"):
        fs.zero3(described, devices=4, tensor=2, split={"*.query": "columns"})
    with pytest.raises(fs.PlanError, match=r"split \('\*.query' …\) has no effect with mesh.tensor = 1"):
        fs.zero3(described, devices=4, split=BERT)


@pytest.mark.parametrize(
    ("split", "sentence"),
    [
        ({}, "has no tensor-parallel layout, so mesh.tensor = 2 cannot be honoured; say how with split={'*.dense': 'output'}"),
        (BERT | {"*.qery": "output"}, "split: no module with parameters is called '*.qery'; did you mean 'query'?"),
        (BERT | {"*_embeddings": "input"}, "is an Embedding, not a Linear"),
    ],
)
def test_rules_that_do_not_fit_are_refused(ranks, split, sentence):
    assert sentence in ranks(2).run(any_model.refused, "bert", split)[0]


def test_running_statistics_are_averaged_before_they_are_used_or_saved(ranks, tmp_path):
    one, two = ranks(2).run(any_model.statistics, str(tmp_path))
    assert not torch.equal(one["own"], two["own"])
    torch.testing.assert_close(one["found"], (one["own"] + two["own"]) / 2)
    for key in ("found", "saved", "loaded"):
        assert torch.equal(one[key], two[key])
    assert torch.equal(one["saved"], one["loaded"])
    assert one["batches"] == 2


def test_norms_of_batches_compute_in_fp32(ranks):
    for losses, dtypes in ranks(2).run(any_model.in_half_precision):
        assert dtypes == {torch.float32}
        want = any_model.unsharded("cnn", 2)[0]
        assert losses == pytest.approx(want, rel=0.02)
