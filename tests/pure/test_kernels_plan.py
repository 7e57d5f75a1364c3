"""Kernels as a choice of the plan: a value that travels with it, and what the planner makes of it."""

import re

import pytest

import fullshard as fs
from fullshard.planner.memory.peak_memory import predict
from fullshard.planner.step.phases import phase_sections

MODEL, H200 = fs.presets.describe("llama-1.5b"), fs.Cluster.load("1xh200")


def plan(**more) -> fs.Plan:
    shape = {"devices": 1, "precision": fs.Precision("bf16"), "batch": fs.Batch(4, 4096), "compile": True}
    return fs.ddp(MODEL, **{**shape, **more})


def test_it_travels_with_the_plan():
    made = plan(kernels=fs.Kernels("flash", update="torch"))
    assert fs.Plan.from_json(made.to_json()) == made
    assert "kernels    attention flash, loss auto, update torch" in str(made)
    assert plan().diff(made) == ["kernels.attention: auto → flash", "kernels.update: auto → torch"]


def test_a_plan_without_it_is_written_as_before():
    assert "kernels" not in plan().to_json()
    assert "kernels" not in str(plan())


REFUSED = [
    (lambda: fs.Kernels("flesh"), "kernels.attention must be one of auto, cudnn, flash, not 'flesh'; did you mean 'flash'?"),
    (lambda: fs.Kernels(loss="triton"), "kernels.loss must be one of auto, fused, torch, not 'triton'"),
    (
        lambda: plan(kernels=fs.Kernels(update="fused"), home=fs.Home(optimizer="host")),
        "kernels.update = 'fused' has no effect: the state of every unit rests off the device; leave it out",
    ),
    (
        lambda: plan(kernels=fs.Kernels(update="torch"), precision=fs.Precision("bf16", moments="int8")),
        "kernels.update = 'torch' has no effect: low-bit state",
    ),
    (
        lambda: plan(kernels=fs.Kernels(update="fused"), precision=fs.Precision("bf16", master="bf16")),
        "kernels.update = 'fused' has no effect: only fp32 masters have a kernel beside torch's, and this one is bf16",
    ),
    (
        lambda: fs.find_plan(MODEL, H200, sequence=4096, fix={"loss_kernel": "torch"}, engine="jax"),
        "loss_kernel = 'torch' has no effect on JAX: XLA chooses kernels; leave it out",
    ),
    (
        lambda: fs.find_plan(MODEL, H200, sequence=4096, fix={"loss_kernel": "torch"}, loss="plain"),
        "loss_kernel is of the chunked loss, and has no effect on 'plain'; leave it out",
    ),
    (
        lambda: fs.estimate(plan(kernels=fs.Kernels(loss="torch")), MODEL, H200, loss="plain"),
        "kernels.loss is of the chunked loss, and has no effect on 'plain'; leave it out",
    ),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED)
def test_what_makes_no_sense_is_refused_in_a_sentence(make, sentence):
    with pytest.raises(fs.FullshardError, match=re.escape(sentence)):
        make()


def test_a_search_takes_the_choice():
    found = fs.find_plan(MODEL, H200, sequence=4096, fix={"attention_kernel": "flash", "compute": "bf16"})
    assert found.plan.kernels == fs.Kernels("flash")


@pytest.mark.parametrize("choice", [{"attention": "flash"}, {"loss": "torch"}, {"update": "torch"}], ids=str)
def test_a_slower_kernel_is_predicted_slower(choice):
    fast, slow = (fs.estimate(plan(kernels=fs.Kernels(**more)), MODEL, H200).step_seconds for more in ({}, choice))
    assert fast < slow < 1.25 * fast


def test_what_a_choice_allocates():
    """Softmax by torch: 2²² logits in fp32 at a time. An update by torch: all gradients in fp32."""
    plain, by_torch = (
        predict(plan(kernels=k), MODEL, reserved=False).allocated for k in (fs.Kernels(), fs.Kernels(loss="torch"))
    )
    assert by_torch - plain == 4 << 22
    short = {"batch": fs.Batch(1, 128), "remat": "full"}
    found = predict(plan(kernels=fs.Kernels(update="torch"), **short), MODEL, reserved=False)
    assert found.terms["gradients"] == 4 * MODEL.numel
    assert found.allocated > predict(plan(**short), MODEL, reserved=False).allocated


def test_the_schedule_has_the_workspace_of_the_plans_attention():
    for kernels, rule in ((fs.Kernels(), "attention_backward"), (fs.Kernels("flash"), "flash_attention_backward")):
        sections = phase_sections(plan(kernels=kernels), MODEL.costs, "chunked")
        rules = {e.rule for _, _, section in sections for e in section.events if "attention" in e.rule}
        assert rules == {rule}


def test_flash_attention_needs_once_more_the_gradient_of_the_queries():
    from fullshard.model.kernel_workspaces import WORKSPACES

    shape = (4, 32, 8, 4096, 4096, 64, 2)  # the workspaces that were measured on an H200, in MiB, beside the results' 96
    assert round(WORKSPACES["attention_backward"](*shape)[0] / 2**20) == 354 - 96
    assert round(WORKSPACES["flash_attention_backward"](*shape)[0] / 2**20) == 482 - 96
