"""The update of packed state in one kernel, on a GPU. Run by hand: python -m pytest tests/gpu"""

import pytest

from fullshard.on_torch.optimizers.adam_update import Rule

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_it_gives_the_bits_of_torchs_kernels(kind):
    from fullshard.on_torch.optimizers.triton_adam import agrees

    assert agrees(Rule(kind, MOMENTS), torch.device("cuda"))


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_with_weight_decay_it_differs_by_a_rounding_of_the_gradient_or_less(kind):
    from fullshard.on_torch.optimizers import triton_adam
    from fullshard.on_torch.optimizers.adam_update import apply_rule
    from fullshard.on_torch.optimizers.packed_masters import pack, unpack

    torch.manual_seed(0)
    rule, group = Rule(kind, MOMENTS), {**triton_adam.SETTINGS, "weight_decay": 0.1}
    master, first, second, gradient = (torch.randn(1 << 16, device="cuda") for _ in range(4))
    second = second.square()
    rounded, low, marked, moved = (
        master.bfloat16(),
        torch.empty(1 << 16, dtype=torch.int16, device="cuda"),
        second.clone(),
        first.clone(),
    )
    pack(master, rounded, low, marked)
    triton_adam.update_packed(rule, gradient, *triton_adam.words(rounded, [low, moved, marked]), None, 2, group)
    apply_rule(rule, master, gradient, [first, second], 2, group)
    ours = torch.empty_like(master)
    unpack(rounded, low, marked, ours)
    for one, other, size in ((ours, master, 4.0), (moved, first, 1.0), (marked, second, 4.0)):
        assert (one != other).float().mean() < 0.02
        assert (one - other).abs().max() <= size * 2**-22
