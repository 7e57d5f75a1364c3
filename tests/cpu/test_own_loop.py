"""The caller's own loop: torch's optimizer, its schedulers, its GradScaler and DCP, with state in any home."""

from itertools import product

import pytest

import fullshard as fs
from fullshard.plan.plan import Home
from tests.cpu import own_loop
from tests.cpu.homes import Case

HOST, DISK, BESIDE, BOTH = Home(optimizer="host"), Home(optimizer="disk"), Home("host", "host"), Home("disk", "disk")
PLACES = ("device", "host", "disk")
EVERY = [Home(p, o, a) for p, o, a in product(PLACES, PLACES, PLACES) if (p, o) != ("disk", "device")]
PLAIN = fs.AdamW(lr=1e-2, weight_decay=0.1)


@pytest.mark.full  # tests/cpu/test_homes.py has every home, too
@pytest.mark.parametrize("world", [1, 2])
def test_with_every_home_the_weights_are_those_of_an_unsharded_run_by_torch(ranks, world):
    """Clipping, accumulation, a scheduler; 24 homes."""
    cases = [Case((home,), optimizer=PLAIN, steps=own_loop.STEPS) for home in EVERY]
    for rank in ranks(world).run(own_loop.from_torch, cases):
        for case, apart in zip(cases, rank, strict=True):
            assert apart < 2e-5, case


OWN_LOOPS = [
    *(((*h,), 1.0, 0.5) for h in ((HOST,), (BESIDE,), (BOTH,), (Home("host", "device"),), (HOST, Home(), DISK, BESIDE))),
    ((HOST,), None, 1.0),
    ((BESIDE, HOST), None, 0.0),
]


@pytest.mark.parametrize(
    ("world", "accumulate", "loops"),
    [
        (2, 2, [((HOST, BOTH, DISK, BESIDE), 1.0, 0.5), OWN_LOOPS[-1]]),
        pytest.param(1, 1, OWN_LOOPS, marks=pytest.mark.full),
        pytest.param(2, 2, OWN_LOOPS, marks=pytest.mark.full),
    ],
    ids=["some", "alone", "all"],
)
def test_an_own_loop_in_bf16_is_train_step(ranks, world, accumulate, loops):
    """Alone with one micro-batch, `train_step` keeps gradients in bf16; the caller's are scaled, and come in fp32. Torch's
    clipping rounds its factor in another place than `train_step`, which moves roundings to bf16."""
    cases = [Case(h, compute="bf16", accumulate=accumulate, clip=c, steps=own_loop.STEPS, share=s) for h, c, s in loops]
    for rank in ranks(world).run(own_loop.from_the_device, cases):
        for case, (resident, engine, steps) in zip(cases, rank, strict=True):
            assert resident < 1e-6, case
            assert engine < (1e-6 if case.clip is None else 1e-3), case
            assert steps == own_loop.STEPS


CASES = [
    Case((HOST, Home()), optimizer=fs.SGD(lr=1e-2, momentum=0.9, nesterov=True), steps=4),
    Case((HOST, BESIDE), optimizer=fs.SGD(lr=1e-2), clip=None, steps=4),
    Case((HOST, DISK), strategy="ddp", steps=4),
    Case((HOST, BESIDE), strategy="zero2", steps=4),
    Case((HOST, Home("host", "disk")), frozen="layers.0.", steps=4),
    Case((BESIDE, HOST), compute="bf16", reduce="bf16", steps=4),
    Case((HOST,), compute="bf16", clip=None, backlog=2, steps=4),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_own_loop_goes_with_everything_else(ranks, case):
    for found in ranks(2).run(own_loop.from_the_device, [case], to_none=False):
        assert max(found[0][:2]) < 1e-6
        assert found[0][2] == 4


UNEVEN = [
    Case(strategy="ddp", steps=4),
    Case(strategy="zero1", steps=4),
    Case((HOST,), strategy="zero2", steps=4),
    Case((HOST, BESIDE, Home()), steps=4),
    Case((BOTH,), accumulate=3, clip=None, steps=4),
    Case(strategy="mixed", arguments=(("replicate_below", 2000),), steps=4),
    Case(strategy="zero3", arguments=(("tensor", 2),), steps=4),
    Case((HOST, Home()), compute="fp16", steps=4),
]


@pytest.mark.full
def test_with_a_factor_by_all_counts_an_own_loop_is_train_step(ranks):
    """Labels that count differ between ranks and micro-batches, so that a mean of means would be another number."""
    for rank in ranks(2).run(own_loop.uneven_against_train_step, UNEVEN):
        for case, (apart, moved, counted) in zip(UNEVEN, rank, strict=True):
            assert apart < (1e-6 if case.compute == "fp32" else 1e-3), case
            assert moved > 1e-2, case
            assert counted, case


@pytest.mark.full
def test_so_it_is_on_four_ranks_in_two_groups(ranks):
    cases = [Case(strategy="hybrid", arguments=(("replicate", 2),), steps=3)]
    for rank in ranks(4).run(own_loop.uneven_against_train_step, cases):
        assert rank[0][0] < 1e-6
        assert rank[0][1] > 1e-2


@pytest.mark.parametrize(
    ("case", "own"),
    [
        (Case((HOST, BOTH, Home()), compute="bf16"), False),
        (Case(), True),
        pytest.param(Case(), False, marks=pytest.mark.full),
        pytest.param(Case(strategy="zero1"), False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_an_own_loop_that_is_resumed_is_the_uninterrupted_one_to_the_bit(ranks, tmp_path, case, own):
    """With a scheduler, which the checkpoint's `extra` takes along. `own`: with the caller's optimizer."""
    assert ranks(2).run(own_loop.resumed, case, str(tmp_path), own=own) == [0.0] * 2


@pytest.mark.full
def test_a_checkpoint_after_own_steps_holds_what_they_trained(ranks, tmp_path):
    cases = [Case((h,), compute="bf16", steps=2) for h in (HOST, BESIDE, BOTH, Home())]
    for rank in ranks(2).run(own_loop.saved, cases, str(tmp_path)):
        for found in rank:
            assert found["apart"] == 0.0
            assert found["moved"] > 1e-3
            assert found["names"] == ["step-00000002", "step-00000003"]


@pytest.mark.full
def test_dcp_takes_a_state_from_any_home_to_any_other_to_the_bit(ranks, tmp_path):
    kinds = [(HOST,), (BESIDE,), (BOTH,), (Home("host", "device"),), (HOST, Home(), DISK)]
    cases = [Case(h, compute="bf16", steps=2, share=1.0) for h in kinds]
    pairs = [*((c, c) for c in cases), (cases[0], cases[2]), (cases[4], cases[1])]
    for rank in ranks(2).run(own_loop.through_dcp, pairs, str(tmp_path)):
        for pair, found in zip(pairs, rank, strict=True):
            assert found["loaded"] == 0.0, pair
            assert found["end"] == 0.0, pair
            assert found["kept"] in ([], [0.0]), pair
            assert found["steps"] == (5, 5)


def test_dcp_goes_from_the_device_to_other_homes_and_back(ranks, tmp_path):
    resident, away = Case(compute="bf16", steps=2), Case((HOST, BOTH), compute="bf16", steps=2)
    for rank in ranks(2).run(own_loop.through_dcp, [(resident, away), (away, resident)], str(tmp_path)):
        for found in rank:
            assert found["loaded"] == 0.0
            assert found["end"] < 1e-6


def test_a_state_dict_of_a_fresh_state_changes_nothing(ranks):
    for found in ranks(2).run(own_loop.dcp_of_a_fresh_state, Case((HOST, Home(), BOTH), compute="bf16")):
        assert found["shown"] == found["of"]
        assert found["keys"] == {"step", "exp_avg", "exp_avg_sq"}
        assert found["apart"] == 0.0
        assert found["counted"] == 0


@pytest.mark.parametrize("homes", [(HOST,), (BESIDE, Home(), BOTH)], ids=str)
def test_whole_weights_are_the_masters(ranks, homes):
    assert max(ranks(2).run(own_loop.full_state_dicts, Case(homes, compute="bf16", steps=2))) == 0.0


@pytest.mark.quick(1)
@pytest.mark.parametrize("homes", [(HOST,), (BESIDE,), (BOTH, Home())], ids=str)
def test_state_dicts_without_dcp(ranks, homes):
    for found in ranks(2).run(own_loop.plain_state_dicts, Case(homes, compute="bf16", steps=2, share=0.0)):
        assert found == {"block": 0.0, "all": 0.0, "after": 0.0}


@pytest.mark.quick(1)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_own_steps_and_the_engines_in_turn(ranks, clip):
    case = Case((HOST, DISK, Home(), BESIDE), compute="bf16", clip=clip)
    for apart, own, engine in ranks(2).run(own_loop.mixed, case):
        assert apart < 1e-6
        assert own == engine == 6


@pytest.mark.quick(1)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_own_step_after_one_that_was_given_up(ranks, clip):
    assert ranks(2).run(own_loop.after_a_step_that_was_given_up, Case((HOST, Home()), clip=clip)) == [0.0, 0.0]


@pytest.mark.parametrize("homes", [(Home(),), (HOST,)], ids=str)
def test_an_own_step_after_a_skipped_one_is_not_skipped(ranks, homes):
    assert min(ranks(2).run(own_loop.after_a_skipped_step, Case(homes))) > 1e-4


def test_gradients_scaled_by_torchs_grad_scaler(ranks):
    for found in ranks(2).run(own_loop.scaled, Case((HOST, BESIDE, Home()), compute="fp16", accumulate=1)):
        for apart, scale, plain, steps, finite in found.values():
            assert apart < 1e-6
            assert scale == plain == 2.0**11  # one overflow halved it
            assert steps == 4
            assert finite


def test_what_cannot_be_is_refused_in_a_sentence(ranks):
    for found in ranks(1).run(own_loop.refusals, Case((BESIDE,))):
        assert "call loss.backward() first, then step()" in found["closure"]
        assert "cannot be replaced while units are offloaded" in found["replaced"]
        assert "this SGD holds offloaded parameters" in found["stranger"]
        assert "load a state dict of this model and optimizer" in found["shape"]
        assert "keep what shard() returned" in found["gone"]


def test_an_optimizer_of_the_callers_own(ranks, tmp_path):
    for found in ranks(2).run(own_loop.of_ones_own, str(tmp_path)):
        assert found["loaded"] == found["end"] == 0.0
        assert found["steps"] == (4, 4)
        assert {"exp_avg", "exp_avg_sq", "mu_product"} <= found["keys"]


def test_a_checkpoint_is_not_replaced_by_another_state_unless_that_is_meant(ranks, tmp_path):
    both = ranks(2).run(own_loop.saved_twice, str(tmp_path))
    assert [len(found["said"]) for found in both] == [1, 0]
    assert "holds weights only" in both[0]["said"][0]
    assert "state.optimizer = yours" in both[0]["said"][0]
    for found in both:
        assert found["same"] == found["meant"] == "accepted"
        assert "overwrite=True" in found["other"]


def test_an_optimizer_that_cannot_update_shards_is_explained_at_its_first_step(ranks):
    for found in ranks(2).run(own_loop.unfit_optimizers):
        for kind in ("WholeMatrices", "OwnCollectives"):
            for way in ("own", "engine"):
                said = found[f"{kind} {way}"]
                assert said.startswith(f"FullshardError: {kind} cannot update shards"), said
                assert "use an optimizer that works element by element" in said
        assert found["Broken own"] == "ValueError: no such group"
