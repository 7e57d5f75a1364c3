"""The kernels of a resident step, on a GPU. Run by hand: python -m pytest tests/gpu"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("columns", [301, 32_000, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_torchs(columns, dtype):
    from fullshard.on_torch.loss.softmax_loss import _by_rows, softmax_loss_

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


def test_scaling_gives_torchs_bits():
    from fullshard.on_torch.loss.softmax_loss import scaled

    given, factor = torch.randn(1001, 300, device="cuda") * 1e-3, torch.tensor(1 / 16_383, device="cuda")
    for kind in (torch.bfloat16, torch.float16):
        assert torch.equal(scaled(given, factor, kind), scaled(given, factor, kind, by_torch=True))


def test_a_label_outside_the_vocabulary_is_no_number():
    from fullshard.on_torch.loss.softmax_loss import softmax_loss_

    labels = torch.tensor([3, 99], device="cuda")
    assert softmax_loss_(torch.zeros(2, 8, device="cuda"), labels).isnan().tolist() == [False, True]


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_one_pass_gives_the_bits_of_torchs_kernels(kind):
    from fullshard.on_torch.optimizers.triton_one_pass import gives_torchs_bits

    assert gives_torchs_bits(kind, torch.device("cuda"))


def test_it_reads_bf16_gradients_and_skips():
    from fullshard.on_torch.optimizers.one_pass_adam import one_pass

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


def trained(share: float, steps: int = 5):
    """Losses, weights and kernels of a small Llama; state and parameters of the last `share` of its units are in host memory."""
    import fullshard as fs
    from fullshard import on_torch

    model = on_torch.load_model("llama-bytes")
    plan = fs.zero3(on_torch.describe(model), devices=1, precision=fs.Precision("bf16"), batch=fs.Batch(4, 256))
    count = round(share * len(plan.units))
    for unit in plan.units[len(plan.units) - count :]:
        plan = plan.change(unit.name, home=fs.Home("host", "host"))
    share = 0.0 if count else None  # the cores round differently
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3, weight_decay=0.0), seed=0, device="cuda", cpu_share=share)
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 256, (4, 257), generator=torch.Generator().manual_seed(step)).cuda()
        losses.append(float(on_torch.train_step(state, [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}], clip=0.1).loss))
    with state.values() as values:
        weights = {n: (t.to_local() if hasattr(t, "to_local") else t).detach().float().cpu() for n, t in values.items()}
    kernels = state.kernels
    if state.offload:
        state.offload.close()
    return losses, weights, kernels


def test_units_beside_offloaded_ones_are_updated_in_one_pass_with_the_same_bits():
    losses, weights, kernels = trained(0.0)
    others, mixed, beside = trained(0.5)
    assert kernels["update"] == beside["update"] == "triton (with clipping, in one pass)"
    assert "gpu_update" in beside or "cpu_update" in beside
    assert others == losses
    for name, weight in weights.items():
        assert torch.equal(mixed[name], weight), name


def losses_of(steps: int = 5, **choices):
    """Losses of a small Llama on a GPU; `choices`: of the strategy."""
    import fullshard as fs
    from fullshard import on_torch

    model = on_torch.load_model("llama-bytes")
    shape = {"precision": fs.Precision("bf16"), "batch": fs.Batch(4, 256)}
    plan = fs.zero3(on_torch.describe(model), devices=1, **shape, **choices)
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), seed=0, device="cuda")
    found = []
    for step in range(steps):
        ids = torch.randint(0, 256, (4, 257), generator=torch.Generator().manual_seed(step)).cuda()
        batch = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}]
        found.append(float(on_torch.train_step(state, batch, loss=on_torch.chunked_loss, clip=0.1).loss))
    return found, state.kernels


CHOICES = [
    {"attention": "flash"},
    {"attention": "cudnn"},
    {"loss": "torch"},
    {"update": "torch"},
    {"loss": "fused", "update": "fused"},
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("more", [{}, {"compile": True}, {"remat": "full"}, {"remat": "selective", "compile": True}], ids=str)
def test_every_choice_of_kernels_trains_alike(choice, more):
    import fullshard as fs

    wanted, _ = losses_of(**more)
    found, kernels = losses_of(kernels=fs.Kernels(**choice), **more)
    assert found == pytest.approx(wanted, rel=2e-3)
    for part, kind in choice.items():
        assert kernels[{"loss": "chunked_loss"}.get(part, part)].startswith("triton" if kind == "fused" else kind)
