"""Units whose shard is the whole: casts in one pass and gradients without a copy, against FSDP's own way, to the bit."""

import pytest
import torch

import fullshard as fs
from fullshard import on_torch
from fullshard.base.errors import FullshardError
from fullshard.on_torch.optimizers import one_pass_adam, sharded_optimizer
from fullshard.on_torch.private.fsdp_groups import GatherGroup

CASES = [
    ("zero3", fs.Batch(2, 32), fs.Precision("bf16")),
    ("ddp", fs.Batch(2, 32, 2), fs.Precision("bf16")),
    ("zero3", fs.Batch(2, 32, 2, "last"), fs.Precision("bf16", "bf16")),
    ("zero1", fs.Batch(2, 32, 2), fs.Precision("fp32", "bf16")),
]


def trained(strategy: str, batch: fs.Batch, precision: fs.Precision, steps: int = 3):
    """This rank's parameters after a few steps, and the last gradient norm."""
    torch.manual_seed(0)
    model = on_torch.load_model("llama-nano")
    devices = torch.distributed.get_world_size()
    plan = fs.strategy(strategy, on_torch.describe(model), devices=devices, batch=batch, precision=precision)
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-2), device="cpu", first_step_checks=False)
    draw = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    for _ in range(steps):
        ids = torch.randint(0, 64, (batch.accumulate, batch.micro_batch, batch.sequence + 1), generator=draw)
        batches = [{"input_ids": i[:, :-1], "labels": i[:, 1:]} for i in ids]
        result = on_torch.train_step(state, batches, loss=on_torch.chunked_loss, clip=1.0)
    return [p.to_local().clone() for p in state.model.parameters()], float(result.grad_norm)


def both_ways(cases):
    """Whether parameters and norms are equal with and without FSDP's own copies."""
    found, ours = [], GatherGroup.copy_once
    for case in cases:
        fast, norm = trained(*case)
        GatherGroup.copy_once = lambda self, computed: None
        try:
            plain, plain_norm = trained(*case)
        finally:
            GatherGroup.copy_once = ours
        found.append(norm == plain_norm and all(torch.equal(a, b) for a, b in zip(fast, plain, strict=True)))
    return found


@pytest.mark.parametrize(("world", "cases"), [(1, CASES), (2, CASES[1:2])])
def test_parameters_are_those_of_fsdps_own_copies_to_the_bit(ranks, world, cases):
    assert ranks(world).run(both_ways, cases) == [[True] * len(cases)] * world


def traced_parts(case):
    """FSDP's parts of a step as a profile names them."""
    with torch.profiler.profile() as profile:
        trained(*case, steps=1)
    return {event.name for event in profile.events() if event.name.startswith("FSDP::")}


def test_a_profile_sees_when_the_backward_of_a_unit_ends(ranks):
    (names,) = ranks(1).run(traced_parts, CASES[0])
    assert {f"FSDP::post_backward_accumulate (model.layers.{i})" for i in range(2)} <= names


def one_pass_and_torch(case):
    """The same with the optimizer that clips and updates in one pass, whose gradients stay as they were computed."""
    plain, norm = trained(*case)
    fits, update, seen = sharded_optimizer._fits_one_pass, one_pass_adam._update_by_torch, set()
    sharded_optimizer._fits_one_pass = lambda *_: True
    one_pass_adam._update_by_torch = lambda kind, tensors, *more: (seen.add(tensors[1].dtype), update(kind, tensors, *more))
    try:
        ours, own_norm = trained(*case)
    finally:
        sharded_optimizer._fits_one_pass, one_pass_adam._update_by_torch = fits, update
    assert seen == {torch.bfloat16}
    return own_norm / norm, max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))


def test_gradients_as_computed_give_the_update_of_wide_ones(ranks):
    ((norms, difference),) = ranks(1).run(one_pass_and_torch, CASES[0])
    assert norms == pytest.approx(1.0, abs=1e-6)
    assert difference < 1e-6


def skipped_steps():
    """An optimizer of one pass through a step that is skipped, and one that is not, beside torch's."""
    made = []
    for kind in (one_pass_adam.one_pass(torch.optim.AdamW), torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        made.append((weight, kind([weight], lr=0.1, weight_decay=0.0, fused=True)))
    for skip in (False, True, False):
        for weight, optimizer in made:
            weight.grad = torch.full_like(weight, 0.5)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(skip))
            optimizer.step()
    (ours, own), (theirs, _) = made
    counts = [float(o.state[w]["step"]) for w, o in made]
    return type(own).__name__, isinstance(own, torch.optim.AdamW), counts, torch.allclose(ours, theirs, atol=1e-7)


def test_a_skipped_step_changes_and_counts_nothing(ranks):
    assert ranks(1).run(skipped_steps) == [("AdamW", True, [2.0, 2.0], True)]


def test_a_setting_that_the_kernel_does_not_know_is_refused():
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = one_pass_adam.one_pass(torch.optim.AdamW)([weight], lr=0.1, maximize=True)
    weight.grad = torch.ones(3)
    with pytest.raises(FullshardError, match="maximize = True has no effect"):
        optimizer.step()


def saved_and_resumed(directory):
    """A state with the optimizer of one pass through a checkpoint: the losses of four steps, straight and resumed."""
    sharded_optimizer._fits_one_pass = lambda *_: True
    found = []
    for resumed in (False, True):
        torch.manual_seed(0)
        model = on_torch.load_model("llama-nano")
        plan = fs.zero3(on_torch.describe(model), devices=1, batch=fs.Batch(2, 32), precision=fs.Precision("bf16"))
        state = on_torch.shard(model, plan, fs.AdamW(lr=1e-2), device="cpu")
        if resumed:
            fs.checkpoint.load(directory, state)
        draw = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 64, (4, 2, 33), generator=draw)
        for i in ids[2 if resumed else 0 :]:
            result = on_torch.train_step(state, [{"input_ids": i[:, :-1], "labels": i[:, 1:]}], clip=1.0)
            if state.step == 2 and not resumed:
                fs.checkpoint.save(directory, state)
        found.append(float(result.loss))
    return found


def test_a_checkpoint_goes_on_as_if_uninterrupted(ranks, tmp_path):
    ((straight, resumed),) = ranks(1).run(saved_and_resumed, str(tmp_path))
    assert straight == resumed
