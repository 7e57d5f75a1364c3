"""Bytes of plans with offloaded parameters, state or activations, counted by hand."""

import dataclasses

import pytest

import fullshard as fs
from fullshard import Home
from fullshard.model import presets
from fullshard.plan.update_pieces import PIECE
from fullshard.planner.memory.peak_memory import PeakMemory, predict
from fullshard.planner.step.schedule import schedule
from fullshard.planner.time.timeline import timeline

NAME = "llama-1.5b"
MODEL = presets.describe(NAME)
UNITS = {u.name: u.numel for u in MODEL.units}
SIZE = presets.preset(NAME)
# The largest unit is the head, 128,256 × 2,048 and a norm of 2,048: eight pieces, the first two longer by 1,024.
LARGEST = 128_256 * 2_048 // 8 + 1024


def plan(home: Home = Home(), *, devices: int = 1, batch: fs.Batch = fs.Batch(2, 4096), remat: str = "full", **more) -> fs.Plan:  # noqa: B008
    bf16 = fs.Precision(compute="bf16", reduce=more.pop("reduce", "fp32"))
    return fs.zero3(MODEL, devices=devices, precision=bf16, batch=batch, remat=remat).change("*", home=home)


def peak(made: fs.Plan, **more) -> PeakMemory:
    return predict(made, MODEL, reserved=False, **more)


def rounded(*sizes: int) -> int:
    return sum(-(-n // 512) * 512 for n in sizes)


def test_the_largest_piece_is_what_the_tests_say():
    assert max(UNITS.values()) == 128_257 * 2_048
    assert LARGEST <= PIECE < 128_256 * 2_048 // 7


def test_state_on_the_host_is_twelve_bytes_a_parameter():
    found = peak(plan(Home(optimizer="host")), cpu_share=0)
    assert found.host == {"optimizer": 12 * MODEL.numel}
    assert found.disk == {}
    shared = peak(plan(Home(optimizer="host"), devices=8), cpu_share=0)
    assert shared.host["optimizer"] == pytest.approx(12 * MODEL.numel / 8, rel=1e-3)


def test_at_the_end_of_backward_a_device_holds_parameters_gradients_and_staging():
    found = peak(plan(Home(optimizer="host")), cpu_share=0)
    assert found.phase == "settle of embed, micro-batch 0"
    tensors = [p.numel for u in MODEL.units for p in u.parameters]
    assert found.terms["params"] == rounded(*[2 * n for n in tensors])
    assert found.terms["gradients"] == rounded(*[2 * n for n in UNITS.values()])  # of one micro-batch on one device
    assert found.terms["staging"] == (4 * 10 + 4 + 4 + 2) * LARGEST  # packed state; a gradient, a master and its rounding
    assert "optimizer" not in found.terms
    several = peak(plan(Home(optimizer="host"), batch=fs.Batch(2, 4096, 2)), cpu_share=0)
    assert several.terms["gradients"] == rounded(*[4 * n for n in UNITS.values()])
    resident = peak(plan(batch=fs.Batch(2, 4096, 2)))
    saved = resident.terms["params"] + resident.terms["optimizer"] - several.terms["params"] - several.terms["staging"]
    saved += resident.terms["gathered"]  # offloaded units compute with their shards
    assert "gathered" not in several.terms
    assert resident.allocated - several.allocated == pytest.approx(saved, abs=1 << 20)


@pytest.mark.parametrize("staging", [1, 2, 7])
def test_every_slot_of_staging_is_a_piece_of_state(staging):
    made = dataclasses.replace(plan(Home(optimizer="host")), staging=staging)
    assert peak(made, cpu_share=0).terms["staging"] == (staging * 10 + 10) * LARGEST
    momentum = fs.SGD(lr=0.1, momentum=0.9)
    assert peak(made, cpu_share=0, optimizer=momentum).terms["staging"] == (staging * 8 + 4) * LARGEST
    out = dataclasses.replace(made, units=plan(Home("host", "host")).units)
    assert peak(out, cpu_share=0).terms["staging"] == (staging * 12 + 8) * LARGEST  # a gradient, a master; parameters in slots
    fp32 = dataclasses.replace(out, precision=fs.Precision())
    assert peak(fp32, cpu_share=0).terms["staging"] == (staging * 12 + 4 + 4) * LARGEST  # a gradient, parameters for the host
    assert "staging" not in peak(made, cpu_share=1).terms


def test_a_plan_that_names_the_cores_share_is_counted_and_timed_by_it():
    where, home = fs.Cluster.named("1xh200"), Home(optimizer="host")
    given = dataclasses.replace(plan(home), cpu_share=1)
    assert peak(given).host == peak(plan(home), cpu_share=1).host
    assert fs.estimate(given, MODEL, where, reserved=False).cpu_share == 1
    open_ = plan(home)
    assert timeline(given, MODEL, where).seconds == timeline(open_, MODEL, where, cpu_share=1).seconds
    assert timeline(given, MODEL, where).seconds != timeline(open_, MODEL, where, cpu_share=0).seconds


def test_gradients_that_the_cpu_updates_wait_for_the_norm_on_the_host():
    found = peak(plan(Home(optimizer="host")), cpu_share=1)
    assert found.host == {"optimizer": 12 * MODEL.numel, "gradients": 2 * MODEL.numel, "staging": 6 * (2 + 2) * LARGEST}
    assert found.terms.get("gradients", 0) <= rounded(4 * max(UNITS.values()))
    half = peak(plan(Home(optimizer="host"), reduce="bf16"), cpu_share=0.5)
    assert half.host["gradients"] == pytest.approx(MODEL.numel, rel=0.05)  # 2 bytes of half of them


def test_without_clipping_gradients_pass_six_slots():
    found = peak(plan(Home(optimizer="host")), cpu_share=1, clip=False)
    assert found.host == {"optimizer": 12 * MODEL.numel, "staging": 6 * (2 + 2) * LARGEST}  # gradients, parameters


def test_a_device_on_which_nothing_rests_still_needs_memory_for_a_step():
    made = plan(Home("host", "host"))
    plain, with_allocator = (predict(made, MODEL, cpu_share=1, reserved=reserved) for reserved in (False, True))
    assert plain.allocated <= with_allocator.allocated <= 1.01 * plain.allocated
    assert with_allocator.reserved >= with_allocator.allocated


def test_a_backlog_bounds_the_gradients_that_wait():
    """The head has eight pieces, every block two: of eight pieces of gradients beside the unit at hand, four blocks'."""
    small = plan(Home(optimizer="host"), batch=fs.Batch(1, 128))  # so that the peak is one of gradients
    without = peak(small, cpu_share=0, clip=False)
    made = dataclasses.replace(small, backlog=8)
    found = peak(made, cpu_share=0, clip=False)
    blocks = [n for name, n in UNITS.items() if "layers" in name]
    assert {-(-n // PIECE) for n in blocks} == {2}
    assert without.terms["gradients"] == rounded(*[2 * n for n in UNITS.values()])
    assert found.phase == without.phase == "settle of embed, micro-batch 0"
    assert found.terms["gradients"] == rounded(2 * UNITS["embed"], *[2 * n for n in blocks[:4]])
    assert without.allocated - found.allocated == rounded(2 * max(UNITS.values()), *[2 * n for n in blocks[4:]])


def test_a_unit_that_is_larger_than_the_backlog_waits_alone():
    made = dataclasses.replace(plan(Home(optimizer="host"), batch=fs.Batch(1, 128)), backlog=1)
    found = peak(made, cpu_share=0, clip=False)
    assert found.phase == "settle of embed, micro-batch 0"
    assert found.terms["gradients"] == rounded(
        2 * UNITS["embed"], 2 * UNITS["model.layers.0"]
    )  # one waits, beside the one at hand


def test_with_clipping_a_backlog_changes_nothing():
    made = plan(Home(optimizer="host"))
    assert peak(dataclasses.replace(made, backlog=1)) == peak(made)


def test_state_on_disk_passes_four_slots_of_the_host():
    found = peak(plan(Home(optimizer="disk")), cpu_share=0)
    assert found.disk == {"optimizer": 12 * MODEL.numel}
    assert found.host == {"staging": 4 * 12 * LARGEST}


def test_parameters_beside_their_state_on_the_host_leave_the_device_and_take_nothing():
    both, state = peak(plan(Home("host", "host")), cpu_share=0), peak(plan(Home(optimizer="host")), cpu_share=0)
    assert both.host == {"optimizer": 12 * MODEL.numel}
    assert both.at_rest == {"host": {"optimizer": 12 * MODEL.numel, "params": 0}}
    more = both.terms["staging"] - state.terms["staging"]
    assert more == (4 * 12 + 8 - 4 * 10 - 10) * LARGEST
    assert state.allocated - both.allocated == state.terms["params"] - more
    by_cores = peak(plan(Home("host", "host")), cpu_share=1, clip=False)
    assert by_cores.host == {"optimizer": 12 * MODEL.numel, "staging": 6 * 2 * LARGEST}  # gradients; no parameters go up


def test_parameters_on_the_host_without_a_packed_master_are_two_bytes_or_four():
    apart = peak(plan(Home(params="host")))
    assert apart.terms["optimizer"] == rounded(*[12 * n for n in UNITS.values()])
    assert apart.host == {"params": 2 * MODEL.numel}
    both = plan(Home("host", "host"))
    fp32 = dataclasses.replace(both, precision=fs.Precision())
    assert peak(fp32, cpu_share=0).host == {"optimizer": 12 * MODEL.numel, "params": 4 * MODEL.numel}
    momentum = peak(both, cpu_share=0, optimizer=fs.SGD(lr=0.1, momentum=0.9))
    assert momentum.host == {"optimizer": 8 * MODEL.numel, "params": 2 * MODEL.numel}
    on_disk = peak(plan(Home("host", "disk")), cpu_share=0)
    assert on_disk.host == {"params": 2 * MODEL.numel, "staging": 4 * 12 * LARGEST}


def test_parameters_on_disk_pass_two_units_and_four_pieces_of_the_host():
    found = peak(plan(Home("disk", "host")), cpu_share=0)
    odd = sum(UNITS.values()) * 2 % 4096
    assert odd == 0  # units are whole pages; pieces of an odd number of half pages are rounded up
    assert 2 * MODEL.numel <= found.disk.pop("params") <= 2 * MODEL.numel + 2048 * 2 * sum(-(-n // PIECE) for n in UNITS.values())
    assert found.disk == {}
    head = [LARGEST] * 2 + [LARGEST - 1024] * 6  # elements of the largest unit's pieces
    assert sum(head) == max(UNITS.values())
    rounded_head = sum(-(-2 * n // 4096) * 4096 for n in head)
    assert found.host == {"optimizer": 12 * MODEL.numel, "staging": 2 * rounded_head + 4 * 2 * LARGEST}
    host = peak(plan(Home("host", "host")), cpu_share=0)
    assert host.allocated - found.allocated == 2 * LARGEST  # a packed master is unpacked; these are narrowed


def test_parameters_on_disk_beside_their_state_on_the_device_are_refused():
    with pytest.raises(fs.FullshardError, match=r"unit embed: home\.params = 'disk' is not carried out with"):
        peak(plan(Home(params="disk")))


def test_under_full_remat_the_activations_that_leave_are_the_inputs_of_blocks():
    made = plan().change("*layers*", home=Home(activations="host"))
    found, resident = peak(made), peak(plan())
    inputs = 2 * 4096 * SIZE.dim * 2  # bytes; tables of angles are too small to move
    assert found.host["activations"] == (SIZE.layers - 1) * inputs  # the last is wanted back at once
    assert found.allocated <= resident.allocated
    saved = [op.nbytes for op in schedule(made, MODEL) if op.kind == "spill"]
    assert saved == [inputs] * (SIZE.layers - 1)


def test_without_remat_activations_leave_and_come_back_once():
    made = plan(remat="none").change("*layers*", home=Home(activations="host"))
    assert peak(made).allocated < 0.8 * peak(plan(remat="none")).allocated
    moved = {kind: [(op.unit, op.nbytes) for op in schedule(made, MODEL) if op.kind == kind] for kind in ("spill", "fetch")}
    assert len(moved["spill"]) == SIZE.layers - 1
    assert moved["fetch"] == moved["spill"][::-1]
    per_block = moved["spill"][0][1] / (2 * 4096 * SIZE.dim * 2)
    assert 5 < per_block < 40  # so many times a block's input


def test_copies_of_units_that_lie_apart_have_the_time_between_them():
    made = plan()
    for i in range(0, SIZE.layers, 4):
        made = made.change(f"*layers.{i}", home=Home(activations="host"))
    operations = schedule(made, MODEL)
    forward = [op for op in operations if op.phase == "forward" or (op.kind in ("spill", "forget") and op.what == "activations")]
    at = {(op.kind, op.unit.rpartition(".")[2]): i for i, op in enumerate(forward)}
    for i in range(0, SIZE.layers, 4):
        assert at["compute", str(i)] < at["spill", str(i)]
        assert at["forget", str(i)] > at["compute", str(min(i + 4, SIZE.layers - 1))]
    backward = [(op.kind, op.unit.rpartition(".")[2]) for op in operations if op.phase == "backward" or op.kind == "fetch"]
    assert backward.index(("fetch", "4")) == backward.index(("compute", "8")) - 1


def test_each_shard_is_fetched_once_for_forward_and_once_for_backward():
    made = plan(Home("host", "host"), devices=4, batch=fs.Batch(1, 1024, 2))
    operations = schedule(made, MODEL)
    for unit, numel in UNITS.items():
        fetched = [op.nbytes for op in operations if (op.kind, op.unit, op.what) == ("fetch", unit, "params")]
        assert fetched == [2 * numel // 4] * len(fetched)
        assert len(fetched) == sum((op.kind, op.unit) == ("gather", unit) for op in operations)
    kept = schedule(plan(Home("host", "host"), devices=4).change("*", reshard=False), MODEL)
    assert sum(op.kind == "fetch" for op in kept) == len(UNITS)


def test_updates_come_in_the_order_of_backward_or_after_the_norm_in_the_order_of_forward():
    made = plan(Home(optimizer="host"), batch=fs.Batch(1, 1024, 3))
    clipped = schedule(made, MODEL)
    order = [op.unit for op in clipped if op.kind == "update" and op.unit]
    assert order == list(UNITS)
    kinds = [op.kind for op in clipped]
    assert kinds.index("norm") < kinds.index("update")
    free = schedule(made, MODEL, clip=False)
    under = [op for op in free if op.kind == "update" and op.unit]
    assert [op.unit for op in under] == list(UNITS)[::-1]
    assert {op.micro for op in under} == {2}
    assert [op.kind for op in free].index("norm") > [op.kind for op in free].index("update")


def test_every_unit_waits_for_its_own_update_before_it_is_gathered():
    made = plan(Home(optimizer="host"), devices=4, batch=fs.Batch(1, 1024, 2))
    operations = schedule(made, MODEL)
    for unit in UNITS:
        mine = [op.kind for op in operations if op.unit == unit and op.kind in ("await", "gather")]
        assert mine[0] == "await"
        assert mine.count("await") == 1


def test_resident_units_of_a_mixture_cost_what_they_cost():
    mixed = plan().change("*layers.1*", home=Home(optimizer="host"))
    found, resident, away = peak(mixed, cpu_share=0), peak(plan()), peak(plan(Home(optimizer="host")), cpu_share=0)
    assert away.allocated < found.allocated < resident.allocated
    moved = sum(n for name, n in UNITS.items() if "layers.1" in name)
    assert found.host == {"optimizer": 12 * moved}


def test_frozen_parameters_have_a_master_but_no_moments_and_no_gradients():
    frozen = dataclasses.replace(
        MODEL,
        units=tuple(
            dataclasses.replace(u, parameters=tuple(dataclasses.replace(p, trainable=False) for p in u.parameters))
            if u.name == "embed"
            else u
            for u in MODEL.units
        ),
    )
    both = predict(plan(Home("host", "host")), frozen, reserved=False, cpu_share=0)
    assert both.host["params"] == 2 * UNITS["embed"]  # the others are told by their masters
    found = predict(plan(Home(optimizer="host")), frozen, reserved=False, cpu_share=0)
    assert found.host["optimizer"] == 12 * (MODEL.numel - UNITS["embed"]) + 4 * UNITS["embed"]
    assert found.terms["params"] == rounded(*[2 * p.numel for u in MODEL.units for p in u.parameters])


def test_homes_of_the_last_units_save_more_the_more_they_are():
    names = list(UNITS)
    peaks = []
    for k in range(0, len(names) + 1, 5):
        made = plan()
        for name in names[len(names) - k :]:
            made = made.change(name, home=Home(optimizer="host"))
        peaks.append(peak(made, cpu_share=1).allocated)
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "ddp"])
def test_every_strategy_takes_homes(strategy):
    bf16 = fs.Precision(compute="bf16")
    made = fs.strategy(strategy, MODEL, devices=8, precision=bf16, batch=fs.Batch(1, 1024, 2))
    away = predict(made.change("*", home=Home("host", "host", "host")), MODEL)
    resident = predict(made, MODEL)
    assert away.allocated < resident.allocated
    ranks = 1 if strategy == "ddp" else 8
    assert away.host["optimizer"] == pytest.approx(12 * MODEL.numel / ranks, rel=1e-3)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_activations_on_disk_are_those_of_the_host_and_two_blocks_pass_it(remat):
    base = plan(remat=remat)
    filed, hosted = (base.change("*layers*", home=Home(activations=place)) for place in ("disk", "host"))
    found, on_host = peak(filed), peak(hosted)
    assert found.disk["activations"] == on_host.host["activations"]
    moved = {
        kind: [(op.unit, op.nbytes) for op in schedule(filed, MODEL) if op.kind == kind] for kind in ("spill", "fetch", "await")
    }
    assert found.disk["activations"] == sum(n for _, n in moved["spill"])
    assert moved["fetch"] == moved["await"] == moved["spill"][::-1]
    assert found.host["activations"] == 2 * max(n for _, n in moved["spill"])
    assert found.allocated <= on_host.allocated  # which has a block come up while another is at work
    assert peak(base).disk == {}


def test_one_block_on_disk_among_others_on_the_host_is_counted_there():
    inputs = 2 * 4096 * SIZE.dim * 2
    made = plan().change("*layers*", home=Home(activations="host")).change("*layers.3", home=Home(activations="disk"))
    found = peak(made)
    assert found.disk == {"activations": inputs}
    assert found.host == {"activations": (SIZE.layers - 2) * inputs + inputs}
