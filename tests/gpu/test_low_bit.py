"""Low-bit optimizer state on a GPU. Run by hand: python -m pytest -s tests/gpu/test_low_bit.py"""

import gc
import time
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS, TOKENS = 4, 256


def precisions():
    import fullshard as fs

    low = [fs.Precision("bf16", moments=kind) for kind in ("bf16", "int8")]
    return [*low, *(fs.Precision("bf16", master="bf16", moments=m, rounding="stochastic") for m in (None, "int8", "fp32"))]


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_the_kernel_gives_the_bits_of_torchs(kind, which):
    from fullshard.on_torch.optimizers.adam_update import Rule
    from fullshard.on_torch.optimizers.low_bit_update import LowBitRule
    from fullshard.on_torch.optimizers.triton_low_bit import gives_torchs_bits
    from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES

    precision = precisions()[which]
    how = LowBitRule.of(precision, Rule(kind, ("exp_avg", "exp_avg_sq")))
    assert gives_torchs_bits(how, PLAN_DTYPES[precision.master], torch.device("cuda"))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_cpu(signed):
    from fullshard.on_torch.optimizers.moment_codes import ElementRange, MomentFormat

    moments, count = MomentFormat("int8"), 10_000
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)) * torch.logspace(-12, 3, count)
    values, found = values if signed else values.square(), []
    for device in (torch.device("cpu"), torch.device("cuda")):
        stored = torch.zeros(moments.size(count), dtype=torch.uint8, device=device)
        random = ElementRange(9, 5, 100, 300).random(7, 0, count, device) & 0xFFFF
        moments.encode(values.to(device), random, stored, signed=signed)
        found.append((stored.cpu(), moments.decode(stored, count, signed=signed).cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def trained(plan, steps=8, **choices):
    """Losses and final weights of a small Llama on random tokens; the state."""
    import fullshard as fs
    from fullshard import on_torch

    state = on_torch.shard(on_torch.load_model("llama-bytes"), plan, fs.AdamW(lr=1e-3), seed=0, device="cuda", **choices)
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 256, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step)).cuda()
        batch = [{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}]
        losses.append(float(on_torch.train_step(state, batch, clip=0.1).loss))
    with state.values() as values:
        weights = {n: (t.to_local() if hasattr(t, "to_local") else t).detach().float().cpu() for n, t in values.items()}
    return losses, weights, state


def plan_of(precision, home=None):
    import fullshard as fs
    from fullshard import on_torch

    description = on_torch.describe(
        on_torch.load_model("llama-bytes"), micro_batch=ROWS, sequence=TOKENS, compute=precision.compute
    )
    plan = fs.zero3(description, devices=1, precision=precision, batch=fs.Batch(ROWS, TOKENS))
    return (plan if home is None else plan.change("*", home=home)), description


@pytest.mark.parametrize("which", range(5))
def test_host_memory_trains_as_the_device_does(which):
    """Streamed pieces are updated by the same kernel. Those of the CPU are within rounding, and one step of a code."""
    from fullshard.plan.plan import Home

    precision = precisions()[which]
    losses, weights, state = trained(plan_of(precision)[0])
    assert state.kernels["update"].startswith("triton (low-bit"), state.kernels
    plain = trained(plan_of(replace(precision, moments=None, master="fp32", rounding="nearest"))[0])[0]
    assert losses[-1] == pytest.approx(plain[-1], rel=0.01)
    near = 2**-5 if precision.master == "bf16" else 2e-3  # a few steps of bf16, for weights between 1 and 2
    for share, limit in ((0.0, 0.0), (1.0, near)):
        _, other, moved = trained(plan_of(precision, Home(optimizer="host"))[0], cpu_share=share)
        assert max(float((weights[n] - other[n]).abs().max()) for n in weights) <= limit, moved.kernels
        moved.offload.close()


def test_moments_save_the_memory_that_is_predicted():
    from fullshard.planner.memory.peak_memory import predict

    found = []
    for precision in precisions()[:2]:
        plan, description = plan_of(precision)
        trained(plan, steps=2)  # whatever a process allocates once
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        state = trained(plan, steps=4)[2]
        assert state.held_bytes()["optimizer"] == sum(2 * plan.precision.moment_bytes(p.numel()) for p in state.parameters())
        found.append((torch.cuda.max_memory_allocated(), predict(plan, description, reserved=False).allocated))
        del state
        gc.collect()
    (bf16, its), (int8, other) = found
    assert bf16 - int8 == its - other > 0


def test_speed():
    """Printed, not asserted: milliseconds of an update of 200 million parameters."""
    from fullshard.on_torch.optimizers.adam_update import Rule
    from fullshard.on_torch.optimizers.low_bit_adam import make_low_bit_adam
    from fullshard.on_torch.optimizers.low_bit_update import LowBitRule
    from fullshard.on_torch.optimizers.one_pass_adam import one_pass
    from fullshard.plan.plan import Precision

    rule, settings = (
        Rule("adamw", ("exp_avg", "exp_avg_sq")),
        {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    )
    for kind in (None, "bf16", "int8"):
        p = torch.nn.Parameter(torch.randn(200_000_000, device="cuda"))
        p.grad = torch.randn_like(p)
        if kind is None:
            made = one_pass(torch.optim.AdamW)([p], fused=True, **settings)
        else:
            how = LowBitRule.of(Precision(moments=kind), rule)
            made = make_low_bit_adam(torch.optim.AdamW, how, {id(p): "p"}, [{"params": [p]}], **settings)
        for i in range(6):
            if i == 1:
                torch.cuda.synchronize()
                start = time.perf_counter()
            made.step()
        torch.cuda.synchronize()
        print(kind or "fp32", f"{(time.perf_counter() - start) / 5 * 1e3:.2f} ms")
        del p, made
