"""Float8 training on ranks, emulated: torchao's own unsharded model is the oracle, and bytes are counted by hand."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchao", reason="float8 is torchao's: make test-float8")

import fullshard as fs
from fullshard import on_torch
from fullshard.data.pack_tokens import pack
from fullshard.on_torch.parallelize.float8 import EMULATED, refuse_float8_device
from fullshard.on_torch.parallelize.refuse import refuse
from fullshard.on_torch.private.torch_internals import options_without_saved
from tests.cpu import float8, mixtures, parity

KINDS = ["tensorwise", "rowwise"]
LAYERS = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]  # weights of a block of float8.SIZE
BLOCK = sum(a * b for a, b in LAYERS)
REST = 2 * 64 * 32 + 32 + 2 * 2 * 32  # embedding, head and norms


@pytest.fixture(scope="module")
def oracle():
    known: dict[tuple[str, int], list[float]] = {}

    def losses(kind: str, parts: int) -> list[float]:
        if (kind, parts) not in known:
            known[kind, parts] = float8.unsharded(kind, parts)
        return known[kind, parts]

    return losses


CASES = [
    ("zero3", {}),
    ("zero2", {"remat": "full"}),
    ("zero3", {"remat": "selective"}),
    ("zero1", {"batch": fs.Batch(1, float8.LENGTH, 2)}),
    ("ddp", {}),
    ("zero3", {"home": fs.Home(activations="host")}),
    ("zero3", {"home": fs.Home(optimizer="host")}),
    ("zero3", {"home": fs.Home("host", "host", "host")}),
]


@pytest.mark.quick(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("strategy", "more"), CASES, ids=str)
def test_losses_are_those_of_an_unsharded_model_of_torchao(ranks, oracle, strategy, more, kind):
    parts = 2 * more.get("batch", fs.Batch()).accumulate
    found = ranks(2).run(float8.sharded, strategy, kind, **more)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(oracle(kind, parts), abs=2e-5)
    assert found[0] != pytest.approx(ranks(2).run(float8.sharded, strategy, None, **more)[0], abs=2e-5)  # it is not bf16


def test_four_ranks_in_two_copies(ranks, oracle):
    (found, *_) = ranks(4).run(float8.sharded, "hybrid", "tensorwise", replicate=2, shard=2)
    assert found == pytest.approx(oracle("tensorwise", 4), abs=2e-5)


def test_groups_that_keep_parameters_gather_them_in_bf16(ranks, oracle):
    (found, *_) = ranks(4).run(float8.sharded, "hpz", "tensorwise", reshard=2)
    assert found == pytest.approx(oracle("tensorwise", 4), abs=2e-5)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "weight"), [("tensorwise", "Float8TrainingTensor"), ("rowwise", "Parameter")])
def test_blocks_compile_once_and_train_alike(ranks, oracle, kind, weight):
    found, again, breaks, gathered = ranks(2).run(float8.compiled, kind)[0]
    assert found == pytest.approx(oracle(kind, 2), abs=2e-2)  # fused kernels round at other places
    assert (again, breaks, gathered) == (0, 0, weight)


class Transposed(torch.autograd.Function):
    """A product whose backward needs a copy of the weight, as those in float8 do on a GPU."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.double() @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return (gradient @ weight.t().contiguous().t()).float(), None


@pytest.mark.parametrize(("options", "gathered"), [(None, False), (options_without_saved(torch.float64), True)])
def test_a_compiled_block_keeps_no_copy_of_a_gathered_weight(options, gathered):
    """In place of float8, whose products a CPU emulates, the gathered dtype is float64. Without options the copy is kept."""
    torch._dynamo.reset()
    x, weight, saved = torch.randn(64, 32, requires_grad=True), torch.randn(48, 32, dtype=torch.float64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = torch.compile(lambda x, weight: Transposed.apply(x.sin(), weight), options=options)(x, weight)
    found.sum().backward()
    assert [t.data_ptr() == weight.data_ptr() for t in saved if t.dtype is torch.float64] == [gathered]
    want = (torch.ones(64, 48, dtype=torch.float64) @ weight).float() * x.detach().cos()
    torch.testing.assert_close(x.grad, want)


def test_equal_modules_are_compiled_once():
    """Dynamo gives up after eight compilations of one module's code, and a process may shard more models than that."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        layer = torch.nn.Linear(16, 16).double()
        torch.compile(layer.forward, options=options_without_saved(torch.float64))(torch.randn(4, 16).double()).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_loop_of_ones_own_has_fresh_scales(ranks, oracle):
    assert ranks(2).run(float8.own_loop, "tensorwise")[0] == pytest.approx(oracle("tensorwise", 2), abs=2e-5)


@pytest.mark.full
def test_it_learns_what_bf16_learns(ranks):
    plain = ranks(2).run(float8.learned, None, 80)[0]
    assert plain[-1] < 0.6 * plain[0]
    wide = ranks(2).run(float8.learned, None, 80, compute="fp32")[0]
    assert wide == pytest.approx(plain, rel=0.005)  # the control: how far rounding to bf16 parts two runs
    for kind in KINDS:
        rounded = ranks(2).run(float8.learned, kind, 80)[0]
        assert rounded == pytest.approx(plain, rel=0.01)
        assert rounded != plain


@pytest.mark.full
def test_the_demos_model_learns_what_it_learns_in_fp32(ranks, tmp_path):
    pack(sorted(Path(json.__file__).parent.glob("*.py")), tmp_path / "tokens", workers=1)
    wide, *others = (ranks(2).run(float8.bytes_losses, str(tmp_path / "tokens"), kind, 60)[0] for kind in (None, *KINDS))
    assert wide[-1] < 0.7 * wide[0]
    for rounded in others:
        assert rounded == pytest.approx(wide, rel=0.02)


def test_checkpoints_are_plain_and_go_on_to_the_bit(ranks, tmp_path):
    values, after = ranks(2).run(float8.saved, str(tmp_path), "zero3", "tensorwise")[0]
    for strategy, kind in (("zero3", "tensorwise"), ("ddp", "tensorwise"), ("zero3", None)):
        found, later = ranks(2).run(float8.loaded, str(tmp_path), strategy, kind)[0]
        assert all(torch.equal(found[n][1], v) and found[n][0] == dtype == torch.float32 for n, (dtype, v) in values.items())
        assert found.keys() == values.keys()
        assert (later == after) == (kind is not None)


@pytest.mark.parametrize(
    ("strategy", "kind", "item", "times"),
    [("zero3", "tensorwise", 1, 2), ("zero1", "tensorwise", 1, 1), ("zero3", "rowwise", 2, 2), ("zero3", None, 2, 2)],
)
def test_weights_with_one_scale_are_gathered_in_a_byte(ranks, strategy, kind, item, times):
    for found in ranks(2).run(float8.sent, strategy, kind):
        assert found["counted"]["gather"] == times * (2 * BLOCK * item + REST * 2) / 2
        assert found["counted"]["reduce"] == 4 * (2 * BLOCK + REST) / 2
        assert found["scales"] == ([4 * 2 * len(LAYERS)] if item == 1 else [])
        assert found["predicted"]["gather"] == found["counted"]["gather"]
        assert found["predicted"]["reduce"] == found["counted"]["reduce"]
        assert found["predicted"]["all_reduce"] == pytest.approx(found["counted"]["all_reduce"], abs=16)


def test_a_cpu_says_that_it_emulates(ranks):
    assert ranks(1).run(notes)[0] == (EMULATED,)


def notes() -> tuple[str, ...]:
    return float8.shard("zero3", "rowwise").notes


# -- refusals ------------------------------------------------------------------------------------------------


def refusal(model: torch.nn.Module, batch: fs.Batch | None = None, **more) -> str:
    plan = fs.zero3(
        on_torch.describe(model, **more),
        devices=1,
        precision=fs.Precision("bf16", float8="rowwise"),
        batch=batch or fs.Batch(2, 16),
    )
    with pytest.raises(fs.FullshardError) as error:
        refuse(model, plan)
    return str(error.value)


def test_models_without_such_layers_are_refused():
    assert "no block has a trained nn.Linear with sizes that are multiples of 16" in refusal(parity.build("plain"))
    assert "no block has a trained nn.Linear" in refusal(parity.build("lora"))
    frozen = float8.build().requires_grad_(False)
    frozen.lm_head.requires_grad_(True)
    assert "no block has a trained nn.Linear" in refusal(frozen)
    assert "no block has a trained nn.Linear" in refusal(float8.build(), classes=["Linear"])


def test_experts_are_refused():
    from transformers import AutoModelForCausalLM

    assert "this model has experts (model.layers.0.mlp.experts)" in refusal(
        AutoModelForCausalLM.from_config(mixtures.config("mixtral"))
    )


def test_tokens_that_cannot_be_multiplied_are_refused():
    said = refusal(float8.build(), batch=fs.Batch(1, 24))
    assert "needs a multiple of 16 tokens in a micro-batch, not 1 × 24 = 24" in said


def test_a_missing_torchao_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert refusal(float8.build()).endswith("which is not installed; pip install 'fullshard[float8]'")


def test_a_gpu_without_float8_is_refused(monkeypatch):
    plan = fs.zero3(on_torch.describe(float8.build()), devices=1, precision=fs.Precision("bf16", float8="rowwise"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(fs.FullshardError, match=r"needs a GPU of compute capability 8\.9, and A100 has 8\.0; leave it out"):
        refuse_float8_device(plan, torch.device("cuda"))
    refuse_float8_device(plan, torch.device("cpu"))
