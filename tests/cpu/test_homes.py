"""State in other homes: the same training, no byte moved more than must be, and checkpoints that any home reads."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

import fullshard as fs
from fullshard import on_torch
from fullshard.plan.plan import Home
from fullshard.planner.step.schedule import schedule
from tests.cpu import homes
from tests.cpu.homes import Case

HOST, DISK = Home(optimizer="host"), Home(optimizer="disk")
EVERY = [Home(p, o, a) for p, o, a in product(("device", "host"), ("device", "host", "disk"), ("device", "host"))][1:]
FILED, BOTH, BESIDE = Home("disk", "host"), Home("disk", "disk"), Home("host", "host")


def close(ranks, cases: list[Case], world: int = 2) -> None:
    for rank in ranks(world).run(homes.compare, cases):
        for case, (numbers, state) in zip(cases, rank, strict=True):
            assert numbers < 1e-6, case
            assert state < 1e-6, case


def test_every_home_trains_as_the_device_does(ranks):
    """On 2 ranks with clipping and accumulation, against everything on the device. Two homes in turn: each has a block."""
    close(ranks, [Case((EVERY[i - 1], EVERY[i])) for i in range(0, len(EVERY), 2)])


@pytest.mark.full
def test_every_home_alone_trains_as_the_device_does(ranks):
    close(ranks, [Case((home,), steps=20) for home in EVERY])


def test_mixtures_of_homes_train_as_the_device_does(ranks):
    third = (Home(), HOST, DISK)
    close(ranks, [Case(third, clip=None), Case((*third, Home("host", "host")), compute="bf16", accumulate=3, sync="last")])


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.full), 1.0])
def test_parameters_on_disk_train_as_on_the_device(ranks, clip):
    homes = [(FILED,), (BOTH,), (BOTH, Home(), FILED, Home("host", "disk", "host"))]
    close(ranks, [Case(home, clip=clip, compute="bf16") for home in homes])


@pytest.mark.quick(1)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_streamed_and_all_on_the_cores(ranks, share):
    close(ranks, [Case((HOST,), share=share, clip=clip, compute="bf16") for clip in (None, 1.0)])


CASES = [
    *(Case((HOST, DISK), strategy=s, clip=None) for s in ("ddp", "zero1", "zero2")),
    Case((HOST, Home("host", "host")), optimizer=fs.SGD(lr=0.1, momentum=0.9, nesterov=True)),
    Case((HOST,), optimizer=fs.SGD(lr=0.1), clip=None),
    *(Case((HOST, Home("host", "host")), share=s, clip=None, backlog=2, compute="bf16") for s in (0.0, 0.5, 1.0)),
    Case((DISK, FILED, Home()), clip=None, backlog=1),
    Case((HOST, DISK), optimizer=fs.Adam(lr=1e-2, weight_decay=0.1)),
    Case((HOST, Home("host", "disk")), frozen="layers.0."),
    Case((HOST, Home()), model="gpt-nano"),
    Case((HOST,), compute="bf16", reduce="bf16"),
    Case((HOST,), compute="bf16", reduce="bf16", master="bf16"),
    Case((Home("host", "host"),), remat="full", compute="bf16", clip=None),
    Case((BESIDE, HOST), frozen="layers.0.", compute="bf16", accumulate=3, sync="last"),
    Case((BESIDE, Home()), frozen="norm", compute="bf16", optimizer=fs.Adam(lr=1e-2, weight_decay=0.1)),
    *(Case((BESIDE,), strategy=s, compute="bf16", clip=None, steps=4) for s in ("ddp", "zero1")),
    Case((BOTH, FILED), frozen="layers.0.", optimizer=fs.SGD(lr=0.1), share=1.0),
    *(Case((BOTH,), strategy=s, accumulate=3, sync="last", share=0.0) for s in ("ddp", "zero2")),
    Case((FILED, BOTH), remat="full", model="gpt-nano", arguments=(("prefetch", fs.Prefetch(3, 2)),)),
]


@pytest.mark.full
def test_homes_on_a_hybrid_mesh(ranks):
    close(ranks, [Case((HOST, DISK), strategy="hybrid", arguments=(("replicate", 2),), steps=3)], world=4)


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_homes_go_with_everything_else(ranks, case):
    close(ranks, [case])


@pytest.mark.parametrize(("share", "limit"), [(0.0, 4), (1.0, 2), pytest.param(0.5, 1, marks=pytest.mark.full)])
def test_no_more_gradients_wait_than_the_plan_allows(ranks, share, limit):
    """A unit that is larger than the limit waits alone."""
    any_number, units = ranks(1).run(homes.waiting, Case((HOST,), clip=None, share=share))[0]
    found, _ = ranks(1).run(homes.waiting, Case((HOST,), clip=None, share=share, backlog=limit))[0]
    assert len(found) == len(units) == len(any_number)
    assert max(found) <= max(limit, *units) < max(any_number)


def test_a_lane_that_fails_is_heard_by_the_backward_that_waits_for_it(ranks):
    assert ranks(1).run(homes.lane_breaks, Case((HOST,), clip=None, backlog=1)) == [("a lane broke", True)]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_lane_that_fails_with_all_its_slots_in_use_holds_nobody_up(ranks, share):
    assert ranks(1).run(homes.lane_breaks, Case((HOST,), clip=None, share=share))[0][0] == "a lane broke"


def test_the_bytes_that_move_are_those_that_must(ranks):
    """A streamed piece: master and two moments, 12 bytes, up and down, of which 2 stay where the parameter is their rounding.
    One on the cores: the gradient down, the new parameter up. On disk: 12 bytes read and written, to whole pages."""
    sizes = {"fp32": (12, 4, 4), "bf16": (10, 2, 4)}  # of state, a new parameter, a gradient that is a sum
    for clip, compute in ((None, "fp32"), (1.0, "fp32"), (None, "bf16")):
        found = ranks(2).run(homes.moved, Case((HOST,), clip=clip, compute=compute))[0]
        lanes, (state, new, gradient) = found["lanes"], sizes[compute]
        assert all(lanes.values())
        assert sum(lanes.values()) == found["own"]
        up, down = state * lanes["gpu"] + new * lanes["cpu"], state * lanes["gpu"] + gradient * lanes["cpu"]
        assert found["moved"] == {"up": up, "down": down, "read": 0, "written": 0}
    alone = ranks(1).run(homes.moved, Case((HOST,), accumulate=1, compute="bf16"))[0]  # nothing is summed
    assert alone["moved"]["down"] == 10 * alone["lanes"]["gpu"] + 2 * alone["lanes"]["cpu"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_parameters_on_the_host_travel_as_half_of_their_masters(ranks, clip):
    """A streamed piece: 12 bytes up and 12 down, parameters among them. One on the cores: the gradient down, and nothing up.
    Beside both, two bytes an element for every gather of the schedule."""
    found = ranks(2).run(homes.moved, Case((BESIDE,), clip=clip, compute="bf16"))[0]
    model = on_torch.describe(on_torch.load_model("llama-nano"), micro_batch=homes.ROWS, sequence=homes.LENGTH, compute="bf16")
    gathered = Counter(op.unit for op in schedule(found["plan"], model) if op.kind == "gather")
    lanes, fetched = found["lanes"], 2 * sum(gathered[name] * n for name, n in found["units"].items())
    assert all(lanes.values())
    assert found["moved"]["up"] == 12 * lanes["gpu"] + fetched
    assert found["moved"]["down"] == 12 * lanes["gpu"] + 4 * lanes["cpu"]


def test_parameters_come_up_once_a_gather_in_the_compute_dtype(ranks):
    """Two micro-batches, forward and backward: four gathers of every shard, two bytes an element; backward finds the last
    units as forward left them where nothing is freed between."""
    found = ranks(2).run(homes.moved, Case((Home("host", "host"),), share=1.0, compute="bf16"))[0]
    assert found["moved"]["up"] <= 4 * 2 * found["shards"]
    assert found["moved"]["up"] > 2 * 2 * found["shards"]
    assert found["moved"]["down"] == 4 * found["own"]  # fp32 gradients; parameters are narrowed on the host


@pytest.mark.full
def test_state_that_goes_to_disk_does_not_pass_through_the_hosts_memory_at_once(ranks, tmp_path):
    """A unit's master and moments do, one unit after the other."""
    masters, rose = ranks(1).run(homes.start_memory, str(tmp_path))[0]
    assert rose < 0.4 * masters


def test_state_on_disk_is_read_and_written_once_a_step(ranks):
    run = ranks(2).run(homes.moved, Case((DISK,)))[0]
    found, own = run["moved"], run["own"]
    assert found["read"] == found["written"]
    assert found["read"] % 4096 == 0
    assert 12 * own <= found["read"] <= 12 * own + 3 * 4096 * (own // 512)


@pytest.mark.parametrize("clip", [pytest.param(1.0, marks=pytest.mark.full), None])
def test_a_shard_on_disk_is_read_once_a_gather_and_written_once_a_step(ranks, clip):
    """Two bytes an element, in pieces of 1,024 elements on a page each; gathers as the planner's schedule has them."""
    found = ranks(2).run(homes.moved, Case((FILED,), clip=clip, compute="bf16"))[0]
    model = on_torch.describe(on_torch.load_model("llama-nano"), micro_batch=homes.ROWS, sequence=homes.LENGTH, compute="bf16")
    gathered = Counter(op.unit for op in schedule(found["plan"], model) if op.kind == "gather")
    pages = {name: 4096 * -(-elements // 1024) for name, elements in found["units"].items()}
    assert found["moved"]["read"] == sum(gathered[name] * size for name, size in pages.items())
    assert found["moved"]["written"] == sum(pages.values())


@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.full), 0.5])
def test_looking_at_the_state_between_steps_changes_nothing(ranks, share):
    """State of the GPU lane is packed while training runs, and unpacked for state.values()."""
    for apart, steps in ranks(2).run(homes.looked_at, Case((HOST, Home()), compute="bf16", share=share, steps=4)):
        assert apart == 0.0
        assert steps == 4


@pytest.mark.quick(1)
@pytest.mark.parametrize(("share", "clip"), [(0.0, None), (0.5, 1.0), (1.0, None)])
def test_parameters_on_the_host_train_as_on_the_device_to_the_bit(ranks, tmp_path, share, clip):
    """With masters between two roundings; and through saves, evaluations right after them, and loads."""
    whole, beside = (Case((h,), share=share, clip=clip, compute="bf16", optimizer=fs.AdamW(lr=1e-2)) for h in (HOST, BESIDE))
    for found in ranks(2).run(homes.beside_each_other, whole, beside, str(tmp_path)):
        one, other = found["losses"]
        assert one == other
        before, saved, held_out, loaded, end, again = one
        assert before == saved  # whose steps had a learning rate of nothing
        assert held_out == loaded != end
        assert again == 0.0  # what was loaded trains to the same end
        assert found["apart"] == 0.0
        assert found["middle"] > 1000
        assert "leave state.values() first" in found["said"]


@pytest.mark.full
def test_a_kernel_for_a_run_of_a_piece_is_given_what_torchs_are(ranks):
    """Where there is Triton, packed pieces go through it (tests/gpu holds its bits against torch's)."""
    bf16 = Case((HOST, BESIDE), compute="bf16", steps=5, share=0.4)
    others = [{"clip": None, "accumulate": 1}, {"frozen": "norm", "clip": None}, {"compute": "fp32"}]
    cases = [bf16, *(replace(bf16, **other) for other in others)]
    for found in ranks(2).run(homes.by_one_kernel, cases):
        assert found == [0.0] * len(cases)


def test_evaluations_between_steps_see_the_new_parameters(ranks):
    for apart, loss, ends_apart in ranks(2).run(homes.between, Case((BOTH, FILED), compute="bf16")):
        assert apart < 1e-6 < loss
        assert ends_apart < 1e-6


@pytest.mark.quick(1)
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_loss_that_is_no_number_changes_nothing(ranks, clip):
    for found in ranks(2).run(homes.skip, Case((HOST, DISK, FILED), clip=clip)):
        assert found["skipped"] == [False] * 4 + [True] * 2 + [False] * 2
        assert found["apart"] < 1e-6


def test_a_gradient_that_is_found_bad_too_late_is_said(ranks):
    said = ranks(2).run(homes.late_nan, Case((HOST,), clip=None, accumulate=1))
    assert all("not finite" in s and "optim.clip" in s for s in said), said


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("one", "other"),
    [((HOST, DISK), (Home(),)), ((Home(),), (DISK, Home("host", "host"))), ((DISK,), (HOST,)), ((BOTH,), (FILED,))],
    ids=["away to device", "device to away", "disk to host", "parameters on disk"],
)
def test_a_checkpoint_of_one_home_goes_on_in_another(ranks, tmp_path, one, other):
    assert max(ranks(2).run(homes.carried, Case(one), Case(other), str(tmp_path / "checkpoints"))) < 1e-6


def test_a_checkpoint_of_packed_state_goes_on_on_the_device_and_back(ranks, tmp_path):
    packed, plain = (Case(homes_, compute="bf16", share=0.0) for homes_ in ((HOST,), (Home(),)))
    for i, pair in enumerate(((packed, plain), (plain, packed))):
        assert max(ranks(2).run(homes.carried, *pair, str(tmp_path / f"checkpoints-{i}"))) < 1e-6


def test_the_plans_share_of_the_cores_is_the_one_that_is_dealt(ranks):
    part, _ = ranks(1).run(homes.dealt, 0.25)[0]
    assert part == pytest.approx(0.25, abs=0.05)  # of nine pieces; half, if nobody says
    _, said = ranks(1).run(homes.dealt, 0.25, 0.5)[0]
    assert "the plan has its own, 0.25" in said


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "case", [Case((HOST, DISK, Home())), Case((DISK, HOST, BESIDE), frozen="norm", compute="bf16"), Case()], ids=str
)
def test_without_room_for_a_copy_a_checkpoint_is_written_from_where_the_state_is(ranks, tmp_path, case):
    for found in ranks(2).run(homes.saved_in_place, case, str(tmp_path)):
        assert found["same"] == 2  # both ranks' files, to the byte
        assert found["apart"] == 0.0
        assert found["arenas"][0] > 0 == found["arenas"][1]
        assert found["done"]
        assert "does not fit into the 1000 B of host memory" in found["note"]


def test_what_cannot_be_is_refused_in_a_sentence(ranks, tmp_path):
    cases = [
        (Case((DISK,)), None, "needs a directory"),
        (Case((FILED,)), None, "home.params = 'disk' needs a directory"),
        (Case((Home(params="disk"),)), str(tmp_path), "saves nothing while the optimizer's own copy"),
        (Case((HOST,)), str(tmp_path), "has no effect"),
        (Case((DISK,)), str(tmp_path / "none"), "is not a directory"),
        (Case((HOST,), optimizer=fs.TorchOptimizer("RAdam", 1e-3)), None, "use AdamW, Adam or SGD"),
    ]
    said = ranks(2).run(homes.refusals, [c for c, _, _ in cases], [d for _, d, _ in cases])[0]
    for (case, _, expected), found in zip(cases, said, strict=True):
        assert expected in found, case


@pytest.mark.parametrize("home", [DISK, FILED], ids=str)
def test_a_disk_that_fills_up_ends_the_run_in_a_sentence(ranks, home):
    said = ranks(1).run(homes.broken, home)[0]
    assert "cannot write" in said
    assert "No space left" in said


def test_a_shard_that_cannot_be_read_ends_the_run_in_a_sentence(ranks):
    assert "params was cut short" in ranks(1).run(homes.cut_short)[0]


def test_nothing_of_a_run_is_seen_in_the_disks_directory(ranks):
    assert ranks(2).run(homes.leftovers) == [[], []]


@pytest.mark.parametrize("clip", [1.0, None])
def test_a_state_that_nobody_holds_is_gone(ranks, clip):
    assert ranks(1).run(homes.outlived, Case((HOST,), clip=clip)) == [0]


@pytest.mark.quick(1)
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_step_that_was_given_up_leaves_nothing_that_waits(ranks, clip):
    found = ranks(2).run(homes.given_up, Case((HOST,), clip=clip))[0]
    assert found == {"numbers": 0.0, "values": 0.0}
