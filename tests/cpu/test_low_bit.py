"""Moments in few bits and stochastic rounding: the same in every home and at every world size, resumed to the bit, as small as
planned, and as good as fp32."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fullshard as fs
from fullshard import on_torch
from fullshard.on_torch.optimizers.moment_codes import NEAREST, RANDOM, ElementRange, MomentFormat, round_to_bf16
from fullshard.plan.plan import Home, Precision
from tests.cpu import homes, low_bit
from tests.cpu.homes import Case

HOST, DISK = Home(optimizer="host"), Home(optimizer="disk")
BF16, INT8 = MomentFormat("bf16"), MomentFormat("int8")
ALL_BF16 = {"compute": "bf16", "master": "bf16", "rounding": "stochastic"}
CPU = torch.device("cpu")


def coded(values: torch.Tensor, random: torch.Tensor | int, *, signed: bool) -> torch.Tensor:
    """Values as int8 has them."""
    stored = torch.zeros(INT8.size(values.numel()), dtype=torch.uint8)
    INT8.encode(values, random, stored, signed=signed)
    return INT8.decode(stored, values.numel(), signed=signed)


# -- codes ------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=600),
    st.integers(0, RANDOM - 1),
    st.integers(0, 1 << 40),
    st.booleans(),
)
def test_decoded_moments_are_encoded_again_without_loss(numbers, random, step, signed):
    """In their own blocks, and in others that hold the same values."""
    values = torch.tensor(numbers, dtype=torch.float32)
    values = values if signed else values.abs()
    once = coded(values, random, signed=signed)
    again = coded(once, ElementRange(3).random(step, 0, len(once), CPU) & 0xFFFF, signed=signed)
    assert torch.equal(again, once)
    half = len(once) // 2
    assert torch.equal(torch.cat([coded(part, NEAREST, signed=signed) for part in (once[:half], once[half:])]), once)


def test_codes_are_off_by_an_eighth_at_most_and_never_lose_a_second_moment():
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(1 << 14, generator=draw) * torch.logspace(-3, 2, 1 << 14)[torch.randperm(1 << 14, generator=draw)]
    random = torch.randint(0, RANDOM, (1 << 14,), generator=draw, dtype=torch.int32)
    off = (coded(values, random, signed=True) - values).abs()
    largest = values.abs().view(-1, 256).amax(1, keepdim=True).expand(-1, 256).flatten()
    in_range = values.abs() > largest * 2.0**-14
    assert in_range.float().mean() > 0.5
    assert (off[in_range] <= values.abs()[in_range] / 8).all()
    assert (off <= largest * 2.0**-14).logical_or(in_range).all()
    squares = (values * 1e-4).square()
    found = coded(squares, random, signed=False)
    assert (found > 0).all()
    in_range = squares > squares.view(-1, 256).amax(1, keepdim=True).expand(-1, 256).flatten() * 2.0**-30
    assert ((found - squares).abs() <= squares / 8)[in_range].all()
    assert in_range.float().mean() > 0.8


@pytest.mark.parametrize("name", ["bf16", pytest.param("int8 first", marks=pytest.mark.full), "int8 second"])
def test_stochastic_rounding_keeps_the_mean(name):
    """Over 4,000 steps, for values of all sizes, those below the smallest code among them: within five deviations."""
    draw, count, steps = torch.Generator().manual_seed(1), 512, 4000
    values = torch.randn(count, generator=draw).abs() * torch.logspace(-7, 0, count)
    values = values if name != "int8 second" else values * 1e-4 + 1e-6  # below the smallest code it is rounded up
    total, square = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for step in range(steps):
        random = ElementRange(7, first=1000).random(step, 0, count, CPU) & 0xFFFF
        if name == "bf16":
            rounded = round_to_bf16(values, random).double()
        else:
            rounded = coded(values, random, signed=name == "int8 first").double()
        total, square = total + rounded, square + rounded.square()
    mean = total / steps
    deviation = ((square / steps - mean.square()).clamp(min=0) / steps).sqrt()
    score = (mean - values.double()).abs() / (deviation + values.abs() * 1e-5 + 1e-12)
    assert (deviation > 0).float().mean() > 0.9
    assert score.max() < 5


def test_an_average_that_moves_by_little_is_not_lost():
    """A second moment of beta 0.999 changes by a thousandth a step: rounding to the nearest would keep it where it is."""
    for moments in (BF16, INT8):
        stored = torch.zeros(moments.size(256), dtype=moments.dtype)
        moments.encode(torch.ones(256), NEAREST, stored, signed=False)
        stuck = stored.clone()
        for step in range(2000):
            decoded = moments.decode(stored, 256, signed=False) * 0.999
            moments.encode(decoded, ElementRange(1).random(step, 0, 256, CPU) & 0xFFFF, stored, signed=False)
            moments.encode(moments.decode(stuck, 256, signed=False) * 0.999, NEAREST, stuck, signed=False)
        assert moments.decode(stored, 256, signed=False).mean() == pytest.approx(math.exp(-2), rel=0.1)
        assert moments.decode(stuck, 256, signed=False).mean() == 1.0


def test_what_is_not_finite_stays_so():
    for bad in (math.inf, math.nan):
        assert not coded(torch.tensor([1.0, bad]), 0, signed=True).isfinite().all()
        assert not round_to_bf16(torch.tensor([bad]), 65535).isfinite().any()


# -- training -----------------------------------------------------------------------------------------------------


CASES = [
    Case((HOST, DISK, Home("host", "host"), Home("disk", "disk")), moments="int8", steps=10, clip=0.1),
    Case((DISK, Home(), Home("host", "device"), HOST), moments="bf16", compute="bf16", steps=10, clip=0.1),
    Case((HOST, DISK), moments="int8", frozen="layers.0.", clip=0.1, share=1.0, optimizer=fs.Adam(lr=1e-2, weight_decay=0.1)),
    Case((HOST, DISK), clip=0.1, **ALL_BF16),
    Case((Home("host", "host"), DISK), moments="int8", clip=None, **ALL_BF16),
    Case((HOST, Home("disk", "disk")), moments="fp32", compute="bf16", master="bf16", clip=0.1),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_home_trains_as_the_device_does_to_the_bit(ranks, case):
    for [(numbers, state)] in ranks(2).run(homes.compare, [case]):
        assert state == 0.0
        assert numbers < 1e-6


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [("zero3", {"devices": 2}), ("zero3", {"devices": 2, "tensor": 2}), ("ddp", {"devices": 2})],
    ids=["rows", "tensor axis", "replicated"],
)
def test_shards_are_rounded_as_the_whole_is_to_the_bit(ranks, strategy, arguments):
    """Random bits depend on an element's place in the whole parameter alone."""
    precision = Precision(master="bf16", compute="bf16", moments="bf16", rounding="stochastic")
    for found in ranks(2).run(low_bit.sharded_and_whole, precision, strategy, arguments, 10):
        assert max(map(max, found.values())) == 0.0


def test_int8_depends_on_shards_in_small_elements_alone(ranks):
    """Blocks are those of a shard, and decide what is too small for a code."""
    for found in ranks(2).run(low_bit.sharded_and_whole, Precision(moments="int8"), "zero3", {"devices": 2}, 10):
        assert max(found["exp_avg"]) < 1e-4
        assert max(found["exp_avg_sq"]) < 1e-6


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Case((HOST, DISK), moments="int8"), Case(moments="int8")),
        (Case(moments="int8"), Case(moments="int8")),
        (Case(moments="bf16"), Case((DISK, Home("disk", "disk")), moments="bf16")),
        (Case(**ALL_BF16), Case((HOST,), **ALL_BF16)),
        (Case((DISK, Home()), moments="int8", **ALL_BF16), Case((Home("host", "host"),), moments="int8", **ALL_BF16)),
    ],
    ids=lambda case: str(case),
)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(ranks, tmp_path, one, other):
    assert ranks(2).run(low_bit.resumed, one, other, str(tmp_path)) == [0.0, 0.0]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "case", [Case((HOST, DISK, Home()), moments="int8"), Case(moments="int8"), Case((DISK, Home()), moments="bf16")], ids=str
)
def test_without_room_for_a_copy_a_checkpoint_is_the_same(ranks, tmp_path, case):
    for found in ranks(2).run(homes.saved_in_place, case, str(tmp_path)):
        assert found["same"] == 2
        assert found["apart"] == 0.0


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("one", "other", "first", "second"),
    [
        (Case(), Case((HOST, Home()), moments="int8"), 1 / 16, 1 / 16),
        (Case(), Case(moments="bf16"), 2.0**-8, 2.0**-8),
        (Case(moments="bf16"), Case((DISK,)), 0.0, 0.0),
        (Case((HOST,), moments="int8"), Case(), 0.0, 0.0),
    ],
    ids=["fp32 to int8", "fp32 to bf16", "bf16 to fp32", "int8 to fp32"],
)
def test_checkpoints_load_under_other_moments(ranks, tmp_path, one, other, first, second):
    for found in ranks(2).run(low_bit.converted, one, other, str(tmp_path)):
        assert found["other"] == 0.0
        assert found["exp_avg"] <= first
        assert found["exp_avg_sq"] <= second


@pytest.mark.quick(1)
@pytest.mark.parametrize("moments", ["int8", "bf16"])
def test_another_world_size_loads_what_was_saved(ranks, tmp_path, moments):
    ranks(2).run(low_bit.saved_whole, Case(moments=moments), str(tmp_path))
    one = ranks(1).run(low_bit.loaded_moments, Case(moments=moments), str(tmp_path))[0]
    two = ranks(2).run(low_bit.loaded_moments, Case(moments=moments), str(tmp_path))[0]
    for name, values in two.items():
        limit = 0.0 if moments == "bf16" else float(values.abs().max()) * 2.0**-14
        assert float((values.float() - one[name].float()).abs().max()) <= limit, name


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", [Case(moments="int8"), Case((HOST, Home()), moments="int8"), Case(moments="bf16")], ids=str)
def test_state_dicts_have_moments_as_values(ranks, case):
    assert ranks(2).run(low_bit.dict_round_trip, case) == [0.0, 0.0]


@pytest.mark.full
def test_the_loss_is_that_of_fp32(ranks):
    precisions = [Precision(), Precision(moments="bf16"), Precision(moments="int8")]
    plain, bf16, int8 = ranks(1).run(low_bit.losses, precisions, 80)[0]
    assert plain < 3.0  # from ln 64 = 4.16
    assert bf16 == pytest.approx(plain, rel=0.01)
    assert int8 == pytest.approx(plain, rel=0.02)


# -- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize(("moments", "share"), [("int8", 0.27), ("bf16", 0.5)])
def test_resident_state_takes_what_is_planned(ranks, moments, share):
    """int8: 260 bytes for each block of 256. Counted by hand from the shards."""
    case = Case(moments=moments, model="llama-bytes")
    for rank, found in enumerate(ranks(2).run(low_bit.held, case)):
        by_hand = 2 * sum(260 * -(-n // 256) if moments == "int8" else 2 * n for n in found["parts"])
        assert found["counted"] == by_hand <= share * 8 * sum(found["parts"])
        if rank == 0:
            assert found["planned"]["device"]["optimizer"] == by_hand


@pytest.mark.quick(1)
@pytest.mark.parametrize(("moments", "each"), [("int8", 260 / 256), ("bf16", 2)])
def test_offloaded_state_rests_and_travels_in_few_bytes(ranks, moments, each):
    """A master of 4 bytes and two moments, in host memory, over PCIe and on disk; files have whole pages. Parameters begin at
    whole blocks."""
    found = ranks(2).run(low_bit.held, Case((HOST,), moments=moments, share=0.0))[0]
    grain, state = (256 if moments == "int8" else 1), 4 + 2 * each
    elements = sum(-(-n // grain) * grain for n in found["parts"])
    assert sum(found["pieces"]) == elements
    assert found["host"] == found["planned"]["host"]["optimizer"] == state * elements
    assert found["moved"]["up"] == found["moved"]["down"] == state * elements
    filed = ranks(2).run(low_bit.held, Case((DISK,), moments=moments, share=0.0))[0]
    assert filed["planned"]["disk"]["optimizer"] == state * elements
    pages = sum(4096 * -(-int(n * width) // 4096) for n in filed["pieces"] for width in (4, each, each))
    assert filed["moved"]["read"] == filed["moved"]["written"] == filed["file"] == pages


# -- refusals -------------------------------------------------------------------------------------------------------


def test_what_has_no_effect_is_refused_in_a_sentence():
    with pytest.raises(fs.PlanError, match="moments = 'fp32' has no effect with master = 'fp32'"):
        Precision(moments="fp32")
    with pytest.raises(fs.PlanError, match="rounding = 'stochastic' has no effect with master = 'fp32'"):
        Precision(moments="bf16", rounding="stochastic")
    with pytest.raises(fs.PlanError, match=r"precision\.moments must be one of fp32, bf16, int8, not 'int4'"):
        Precision(moments="int4")


def test_optimizers_without_such_state_are_refused(ranks):
    cases = [
        Case(moments="int8", optimizer=fs.SGD(lr=0.1, momentum=0.9)),
        Case(optimizer=fs.TorchOptimizer("RAdam", 1e-3), **ALL_BF16),
    ]
    *both, own = ranks(1).run(low_bit.refusals, [*cases, Case(moments="int8")])[0]
    assert all("are for Adam and AdamW" in said for said in both)
    assert "does not; pass optimizer=fullshard.AdamW" in own


def test_a_plan_has_its_moments_in_its_text_and_json():
    plan = fs.zero3(on_torch.describe(on_torch.load_model("llama-nano")), devices=2)
    low = fs.zero3(on_torch.describe(on_torch.load_model("llama-nano")), devices=2, precision=Precision(moments="int8"))
    assert fs.Plan.from_json(low.to_json()) == low
    assert "moments" not in plan.to_json()
    assert "moments int8" in str(low)
    assert low.diff(plan)
