"""The expert axis: experts spread over ranks train as on one."""

import pytest

import fullshard as fs
from fullshard import FullshardError, on_torch
from tests.cpu import any_model, experts

MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", MIXTURES)
def test_two_ranks_are_one(ranks, kind):
    for found in ranks(2).run(experts.compared, kind, 2):
        assert found["loss"] < 1e-6
        assert found["weights"] < 1e-6


@pytest.mark.parametrize(
    ("expert", "replicate", "accumulate", "remat"),
    [
        pytest.param(4, 1, 1, "none", marks=pytest.mark.full),
        pytest.param(2, 1, 2, "full", marks=pytest.mark.full),
        (2, 2, 1, "none"),
    ],
)
def test_four_ranks_are_one(ranks, expert, replicate, accumulate, remat):
    """Experts over all four, over two and sharded over the others, over two and replicated."""
    for found in ranks(4).run(experts.compared, "mixtral", expert, replicate, accumulate, remat=remat):
        assert found["loss"] < 1e-6
        assert found["weights"] < 1e-6


def test_the_gradient_norm_is_that_of_sharded_experts(ranks):
    want = ranks(2).run(experts.norms, "qwen3_moe", 1)[0]
    for found in ranks(2).run(experts.norms, "qwen3_moe", 2):
        assert found == pytest.approx(want, rel=1e-5)


def test_a_rank_whose_experts_nobody_chose(ranks):
    for found in ranks(2).run(experts.lonely, "mixtral"):
        assert 0 < found["loss"] < 10


def test_exchanged_bytes_are_the_formulas(ranks):
    """Tokens × choices × width × bytes, there and back, in forward and in backward, of two mixtures."""
    found = ranks(2).run(experts.traffic, "mixtral", 2)
    sent, formula, count = (sum(row[i] for row in found) for i in range(3))
    assert count == 2 * 2 * 4
    assert sent == 2 * 4 * formula


@pytest.mark.quick(1)
@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 1)])
def test_a_checkpoint_goes_on_with_experts_spread_otherwise(ranks, tmp_path, first, second):
    for apart in ranks(4).run(experts.resumed, str(tmp_path), "mixtral", first, second):
        assert apart < 1e-6


def test_what_cannot_be_spread_is_refused(ranks):
    assert "has 4 experts, which mesh.expert = 3 does not divide" in ranks(3).run(experts.refused, "mixtral", 3)[0]
    with pytest.raises(FullshardError, match="has no experts that could be units of their own"):
        on_torch.describe(any_model.build("bert"), experts=True)
    described = on_torch.describe(any_model.build("mixtral"))
    with pytest.raises(FullshardError, match=r"expert = 2 has no effect: no unit has layout 'experts'"):
        fs.zero3(described, devices=4, expert=2)
    apart = on_torch.describe(any_model.build("mixtral"), experts=True)
    with pytest.raises(FullshardError, match=r"mesh.expert = 3 must divide mesh.shard = 4"):
        fs.zero3(apart, devices=4, expert=3)
    with pytest.raises(FullshardError, match="spreads sharded experts, and this strategy keeps"):
        fs.zero1(apart, devices=4, expert=2)
