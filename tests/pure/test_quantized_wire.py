"""The plan's wire: a value that travels with the plan, and what the planner makes of it."""

import dataclasses
import re

import pytest

import fullshard as fs
from fullshard.cluster.topology import Cluster
from fullshard.planner.memory.peak_memory import predict
from fullshard.planner.time.timeline import timeline
from fullshard.planner.wire_bytes import wire_bytes

NANO, BIG = fs.presets.describe("llama-nano"), fs.presets.describe("llama3-8b")
INT8 = fs.Wire("int8", "int8")
BF16 = fs.Precision("bf16")
FREE = {"bandwidth": 1e18, "latency": 1e-12, "start": 1e-12}  # of a link that costs nothing


def plan(wire: fs.Wire = INT8, **more) -> fs.Plan:
    return fs.zero3(NANO, devices=4, wire=wire, **more)


# -- a value ------------------------------------------------------------------------------------------


def test_it_travels_with_the_plan_and_changes_its_name():
    made, plain = plan(fs.Wire("fp8", "int8", 64, True)), plan(fs.Wire())
    assert fs.Plan.from_json(made.to_json()) == made
    assert made.digest != plain.digest
    assert "wire       gathers fp8, reductions int8, in blocks of 64, with error feedback" in str(made)
    assert plain.diff(made)[0] == "wire.gather: plain → fp8"
    assert "wire" not in str(plain)


def test_other_memory_is_a_choice_of_the_plan():
    made = plan(fs.Wire(memory="symmetric"), precision=fs.Precision("fp16"))
    assert fs.Plan.from_json(made.to_json()) == made
    assert "wire       gathers plain, reductions plain, in symmetric memory" in str(made)
    assert "memory" not in plan().to_dict()["wire"]  # a plan without it keeps its name


def test_a_plain_plan_is_written_as_before():
    assert "wire" not in plan(fs.Wire()).to_dict()
    # Written by the release before there was a wire.
    assert plan(fs.Wire()).digest.startswith("555801839e30")
    assert fs.Plan.from_dict(plan(fs.Wire()).to_dict() | {"wire": dataclasses.asdict(fs.Wire())}) == plan(fs.Wire())


REFUSED = [
    (lambda: fs.Wire("int4"), "wire.gather must be one of plain, int8, fp8, not 'int4'; did you mean 'int8'?"),
    (lambda: fs.Wire("int8", block=0), "wire.block must be a positive integer, not 0"),
    (lambda: fs.Wire("int8", block=8), "wire.block = 8 must be at least 16, or its scales outweigh what they save"),
    (lambda: fs.Wire(block=128), "wire.block = 128 has no effect: gathers and reductions are plain; leave it out"),
    (lambda: fs.Wire("int8", error_feedback=True), "wire.error_feedback has no effect with wire.reduce = 'plain'"),
    (lambda: fs.Wire(memory="nvlink"), "wire.memory must be one of torch, nccl, symmetric, not 'nvlink'"),
    (lambda: fs.Wire("int8", memory="nccl"), "wire.memory = 'nccl' has no effect on quantised messages; leave it out"),
    (
        lambda: fs.ddp(NANO, devices=4, wire=fs.Wire(memory="symmetric")),
        "wire (gathers plain, reductions plain, in symmetric memory) has no effect: mesh.shard = 1",
    ),
    (lambda: fs.Wire("int8", "int8", error_feedback=1), "wire.error_feedback must be true or false, not 1"),
    (lambda: plan("int8"), "plan.wire must be a Wire, not 'int8'"),
    (
        lambda: fs.ddp(NANO, devices=4, wire=INT8),
        "wire (gathers int8, reductions int8, in blocks of 256) has no effect: mesh.shard = 1, so nothing is gathered",
    ),
    (
        lambda: plan().change("*", layout="replicated"),
        "wire (gathers int8, reductions int8, in blocks of 256) has no effect: every unit of this plan is replicated",
    ),
    (
        lambda: plan(precision=fs.Precision("fp16")),
        "wire (gathers int8, reductions int8, in blocks of 256) does not work with precision.compute = 'fp16'; write 'bf16'",
    ),
]


@pytest.mark.parametrize(("build", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused(build, sentence):
    with pytest.raises(fs.PlanError, match=f"^{re.escape(sentence)}"):
        build()


def test_misread():
    data = plan().to_dict()
    data["wire"]["blok"] = 3
    with pytest.raises(fs.PlanError, match=r"plan\.wire has an unknown key 'blok'; did you mean 'block'\?"):
        fs.Plan.from_dict(data)
    del data["wire"]["blok"], data["wire"]["gather"]
    with pytest.raises(fs.PlanError, match=r"plan\.wire lacks the key 'gather'"):
        fs.Plan.from_dict(data)


# -- what it costs ------------------------------------------------------------------------------------


def test_message_bytes_by_hand():
    assert INT8.message_bytes(1024) == 1024 + 4 * 4
    assert INT8.message_bytes(1025) == 1056  # 1,025 bytes and 5 scales, rounded up to 16
    assert fs.Wire("int8", block=64).message_bytes(1024) == 1024 + 16 * 4


def test_bytes_by_hand():
    """Four ranks, zero3: each unit's shard is gathered twice, and each rank sends its message to three others."""
    made = plan(batch=fs.Batch(1, 16), precision=BF16)
    block = [16 * 16, 8 * 16, 8 * 16, 16 * 16, 32 * 16, 32 * 16, 32 * 16, 16, 16]  # every parameter has blocks of its own
    shards = [n // 4 for n in [16 * 64, *block, *block, 16, 16 * 64]]
    messages = [-(-(n + 4 * -(-n // 256)) // 16) * 16 for n in shards]
    found = wire_bytes(made, NANO)
    assert (found.gather, found.reduce) == (2 * 3 * sum(messages), 3 * sum(messages))


def test_a_large_model_sends_about_a_quarter_or_a_half():
    for precision, share in ((fs.Precision(), 0.254), (fs.Precision("bf16", "bf16"), 0.508)):
        if precision.compute == "fp32" and not any(key[0] == "fp32" for key in BIG.costs.traces):
            continue
        made = fs.zero3(BIG, devices=16, batch=fs.Batch(1, 4096), precision=precision)
        plain, found = (wire_bytes(p, BIG) for p in (made, dataclasses.replace(made, wire=INT8)))
        assert found.gather / plain.gather == pytest.approx(share, abs=0.001)
        assert found.reduce / plain.reduce == pytest.approx(share, abs=0.001)


def test_time_on_a_slow_network_and_on_a_free_one():
    """Where the wire bounds the step, its time falls as the bytes do; where it costs nothing, the passes cost."""
    made = fs.zero3(BIG, devices=8, batch=fs.Batch(1, 512), precision=BF16)
    both = (made, dataclasses.replace(made, wire=INT8))
    base = Cluster.named("8xh100")
    link = lambda **more: dataclasses.replace(
        base, node=dataclasses.replace(base.node, link=dataclasses.replace(base.node.link, **more))
    )
    slow, free = link(bandwidth=1e9), link(**FREE)
    plain, found = (timeline(p, BIG, slow, spread=0.0).seconds for p in both)
    units = sum(u.numel for u in BIG.units)
    wires = [units * (2 * 2 + 4), units * (2 + 1) * (1 + 4 / 256)]  # bytes of two gathers and a reduction
    assert found / plain == pytest.approx(wires[1] / wires[0], rel=0.1)
    plain, found = (timeline(p, BIG, free, spread=0.0) for p in both)
    assert found.busy["gather"] > plain.busy["gather"]
    assert found.seconds >= plain.seconds


def test_a_gpu_packs_and_unpacks_in_one_pass_each():
    """Bytes by hand, at measured shares of the bandwidth of a copy, on eight ranks whose link is free."""
    base = Cluster.named("8xh100")
    free = dataclasses.replace(base, node=dataclasses.replace(base.node, link=dataclasses.replace(base.node.link, **FREE)))
    whole, code = sum(u.numel for u in BIG.units), 1 + 4 / 256  # bytes of a code and its share of a scale
    packed, unpacked = whole / 8 * (2 + code), whole * (code + 2)
    shares = {"int8": (0.63, 0.85, 0.63, 0.45), "fp8": (0.46, 0.79, 0.46, 0.28), "kept": (0.63, 0.85, 0.42, 0.45)}
    wires = {"int8": INT8, "fp8": fs.Wire("fp8", "fp8"), "kept": fs.Wire("int8", "int8", error_feedback=True)}
    for name, wire in wires.items():
        pack, unpack, pack_gradients, add = shares[name]
        kept = 2 * code * whole if wire.error_feedback else 0
        gathers = 2 * (packed / pack + unpacked / unpack)
        reductions = (whole * (4 + code) + kept) / pack_gradients + (whole * code + whole / 8 * 4) / add
        made = fs.zero3(BIG, devices=8, batch=fs.Batch(1, 512), precision=BF16, wire=wire)
        busy = timeline(made, BIG, free, spread=0.0).busy
        assert busy["gather"] == pytest.approx(gathers / base.of("hbm"), rel=0.001)
        assert busy["reduce"] == pytest.approx(reductions / base.of("hbm"), rel=0.001)


def test_blocks_that_no_kernel_is_for_take_torchs_passes():
    made = fs.zero3(BIG, devices=8, batch=fs.Batch(1, 512), precision=BF16)
    small, large = (dataclasses.replace(made, wire=fs.Wire("int8", "int8", block)) for block in (16_384, 16_385))
    times = [timeline(p, BIG, Cluster.named("8xh100"), spread=0.0).busy for p in (small, large)]
    assert times[1]["reduce"] > 2 * times[0]["reduce"]
    peaks = [predict(p, BIG, reserved=False).allocated for p in (small, large)]
    assert peaks[1] >= peaks[0]


def test_memory_of_messages_and_residuals():
    made = fs.zero3(BIG, devices=8, batch=fs.Batch(1, 512), precision=BF16)
    wires = (fs.Wire(), INT8, fs.Wire("int8", "int8", error_feedback=True))
    plain, found, kept = (predict(dataclasses.replace(made, wire=w), BIG, reserved=False) for w in wires)
    assert plain.allocated < found.allocated < kept.allocated
    assert "residuals" not in found.terms
    whole = sum(u.numel for u in BIG.units)
    assert kept.terms["residuals"] == pytest.approx(whole * (1 + 4 / 256), rel=0.001)  # all parameters, on every rank
