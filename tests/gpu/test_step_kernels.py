"""The kernels of a resident step, on a GPU. Run by hand: python -m pytest tests/gpu"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("columns", [301, 32_000, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_torchs(columns, dtype):
    from fullshard.on_torch.kernels.softmax_loss import _by_rows, softmax_loss_

    draw = torch.Generator("cuda").manual_seed(0)
    logits = (4 * torch.randn(130, columns, device="cuda", generator=draw)).to(dtype)
    labels = torch.randint(0, columns, (130,), device="cuda", generator=draw)
    labels[::5] = -100
    ours, torchs = logits.clone(), logits.clone()
    losses, wanted = softmax_loss_(ours, labels), _by_rows(torchs, labels)
    assert (losses - wanted).abs().max() < 1e-4
    assert not ours[::5].any()
    step = 2**-8 if dtype is torch.bfloat16 else 2e-6  # one rounding of the largest value
    assert (ours.float() - torchs.float()).abs().max() <= step


def test_a_label_outside_the_vocabulary_is_no_number():
    from fullshard.on_torch.kernels.softmax_loss import softmax_loss_

    labels = torch.tensor([3, 99], device="cuda")
    assert softmax_loss_(torch.zeros(2, 8, device="cuda"), labels).isnan().tolist() == [False, True]


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_one_pass_gives_the_bits_of_torchs_kernels(kind):
    from fullshard.on_torch.kernels.triton_one_pass import gives_torchs_bits

    assert gives_torchs_bits(kind, torch.device("cuda"))


def test_it_reads_bf16_gradients_and_skips():
    from fullshard.on_torch.kernels.one_pass_adam import one_pass

    start, gradient = torch.randn(5000, device="cuda"), torch.randn(5000, device="cuda").bfloat16()
    found = []
    for kind, computed in ((one_pass(torch.optim.AdamW), True), (torch.optim.AdamW, False)):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], lr=0.01, weight_decay=0.0, fused=True)
        if computed:
            weight.grad_dtype = torch.bfloat16
        for skip in (0.0, 1.0, 0.0):
            weight.grad = gradient.clone() if computed else gradient.float()
            optimizer.found_inf = torch.tensor(skip, device="cuda")
            optimizer.step()
        found.append((weight.detach(), float(optimizer.state[weight]["step"])))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == 2.0
