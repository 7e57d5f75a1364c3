"""One truth about every copy of a weight: whatever came before, a reader sees the masters, a writer is heeded, and a step that
failed or was skipped has left nothing. Held against runs that nothing disturbs, the unsharded model, and torch's AdamW."""

import pytest

from fullshard.plan.plan import Home
from tests.cpu import copies
from tests.cpu.homes import Case

RESIDENT = [Case(strategy=s) for s in ("zero2", "zero3", "zero1", "ddp")] + [Case(strategy="zero2", compute="bf16")]
AWAY = [Case((home,)) for home in (Home("host", "host"), Home("device", "host"), Home("disk", "disk"))]
BEHIND = [Case((Home("device", home),), accumulate=2) for home in ("host", "disk")]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "case", [*RESIDENT, Case((Home("device", "host"),), strategy="zero2"), Case((Home("host", "host"),))], ids=str
)
def test_a_save_and_a_reader_see_the_masters_whatever_ran_before(ranks, case):
    for found in ranks(2).run(copies.looked_at, case):
        for before, each in found.items():
            assert each["shards"] or any(h.params != "device" or h.optimizer != "device" for h in case.homes), before
            assert each["read"] == each["written"] == each["loaded"] == 0.0, (before, each)


FAILING = [
    Case(strategy="zero2"),
    Case(strategy="ddp"),
    *AWAY[:2],
    Case(strategy="ddp", sync="last"),
    AWAY[2],
    Case(remat="full"),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", FAILING, ids=str)
def test_a_step_that_failed_has_left_nothing(ranks, case):
    for found in ranks(2).run(copies.failed_steps, case):
        assert set(found.values()) == {0.0}, found


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", [Case(strategy=s) for s in ("ddp", "zero1", "zero3")] + AWAY[:1], ids=str)
def test_zero_grad_clears_what_an_own_loop_left_after_an_exception(ranks, case):
    for last in (False, True):
        assert max(ranks(2).run(copies.own_failures, case, last)) == 0.0


@pytest.mark.parametrize("case", [Case(strategy="zero2"), AWAY[0]], ids=str)
def test_a_step_refuses_gradients_that_are_not_its_own(ranks, case):
    for sentence in ranks(2).run(copies.left_gradients, case):
        assert "has one already; call state.optimizer.zero_grad() before it" in sentence


def test_updates_during_a_backward_that_fails_are_said(ranks):
    note, *after, apart = ranks(2).run(copies.torn, Case((Home("host", "host"),), accumulate=1))[0]
    assert note.startswith("a step failed after some of its updates were done")
    assert after == [note] * 3
    assert apart == "0e+00"


def test_weights_of_bad_gradients_are_refused_until_a_load(ranks):
    *after, finite = ranks(2).run(copies.bad_gradients, Case((Home("host", "host"),), accumulate=1))[0]
    assert all("a gradient of the last step was not finite" in sentence for sentence in after)
    assert finite == "True"


@pytest.mark.quick(2)
@pytest.mark.parametrize("home", [Home(), Home("host", "host"), Home("disk", "disk"), Home("device", "host")], ids=str)
def test_units_that_steps_leave_out_equal_the_unsharded_model(ranks, home):
    for apart, steps in ranks(2).run(copies.skipped_units, "zero3", home):
        assert apart < 2e-6
        assert steps == [2.0]


@pytest.mark.quick(2)
@pytest.mark.parametrize("remat", ["none", "full", "selective"])
def test_statistics_move_once_a_step_and_never_in_a_skipped_one(ranks, remat):
    for found in ranks(2).run(copies.statistics, remat):
        assert found["steps"] < 1e-6
        assert found["skipped"] == 0.0
        assert "the buffer blocks.0.1.running_mean is not finite" in found["said"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", ["zero2", "zero1", "ddp"])
def test_a_forward_between_backward_and_step_changes_nothing(ranks, strategy):
    assert max(ranks(2).run(copies.forwards_between, Case(strategy=strategy))) == 0.0


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", BEHIND, ids=str)
def test_an_average_taken_right_after_a_step_is_of_its_weights(ranks, case):
    assert max(ranks(2).run(copies.averages, case)) < 1e-6


def test_what_would_be_lost_is_refused(ranks):
    found = ranks(2).run(copies.refusals, BEHIND[0])[0]
    assert "call loss.backward() before each step()" in found.pop("second step")
    assert "was unfrozen after shard()" in found.pop("unfrozen")
    for way, sentence in found.items():
        assert "cannot be written to in place" in sentence, way


def test_a_parameter_that_is_unfrozen_later_is_trained_or_refused(ranks):
    *sentences, trains = ranks(2).run(copies.unfrozen, Case())[0]
    assert all(f"the optimizer does not hold {copies.NAME}" in s for s in sentences)
    assert trains


def test_torch_keeps_its_own_reduction(ranks):
    assert all(ranks(2).run(copies.own_reduction, AWAY[0]))
