"""Bytes on the wire: hand counts from the number of parameters, and the numbers of the ZeRO paper."""

import pytest

from fullshard import Batch, Precision, strategy
from fullshard.model import presets
from fullshard.planner.wire_bytes import WireBytes, sent_bytes, wire_bytes

NANO = presets.describe("llama-nano")
P = 16 * 64 * 2 + 16 + 2 * (16 * 16 * 2 + 2 * 8 * 16 + 3 * 32 * 16 + 2 * 16)  # parameters by hand; all rows divide by 4
AGREE = 2 * (8 + 48) * 3 / 4  # all-reduces of the step's tokens, and of norm, loss and what ranks compare, over 4 ranks


def sent(name: str, accumulate: int = 1, sync: str = "every", **arguments: int) -> WireBytes:
    precision = Precision("bf16", "fp32", "fp32")
    plan = strategy(name, NANO, **(arguments or {"devices": 4}), precision=precision, batch=Batch(1, 16, accumulate, sync))
    return wire_bytes(plan, NANO)


def test_one_collective():
    assert sent_bytes("gather", 800, 8) == 700  # seven shards of a hundred pass through each rank
    assert sent_bytes("reduce", 800, 8) == 700
    assert sent_bytes("all_reduce", 800, 8) == 1400
    assert sent_bytes("all_to_all", 800, 8) == 700
    assert sent_bytes("all_reduce", 800, 1) == 0


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("ddp", {"devices": 4}, WireBytes(copies=2 * 4 * P * 3 / 4, agree=AGREE)),
        ("zero1", {"devices": 4}, WireBytes(gather=2 * P * 3 / 4, reduce=4 * P * 3 / 4, agree=AGREE)),
        ("zero2", {"devices": 4}, WireBytes(gather=2 * P * 3 / 4, reduce=4 * P * 3 / 4, agree=AGREE)),
        ("zero3", {"devices": 4}, WireBytes(gather=2 * 2 * P * 3 / 4, reduce=4 * P * 3 / 4, agree=AGREE)),
        (
            "hybrid",
            {"replicate": 2, "shard": 2},
            WireBytes(gather=2 * 2 * P / 2, reduce=4 * P / 2, copies=2 * (4 * P / 2) / 2, agree=AGREE),
        ),
        ("zero3", {"devices": 1}, WireBytes()),
    ],
)
def test_by_hand(name, arguments, expected):
    """bf16 parameters gathered once or twice, fp32 gradients reduced once."""
    assert sent(name, **arguments) == expected


@pytest.mark.parametrize("accumulate", [2, 3, 4, 7])
def test_accumulation_by_hand(accumulate):
    """zero3 gathers and reduces for each micro-batch; with `sync = last` it reduces once; zero1 does both once."""
    every, late = sent("zero3", accumulate), sent("zero3", accumulate, "last")
    assert (every.gather, every.reduce) == (accumulate * 3 * P, accumulate * 3 * P)
    assert (late.gather, late.reduce) == (accumulate * 3 * P, 3 * P)
    assert (sent("zero1", accumulate).gather, sent("zero1", accumulate).reduce) == (1.5 * P, 3 * P)
    assert every.agree == late.agree == AGREE


def test_as_the_zero_paper_counts():
    """Rajbhandari et al. (2020), section 7: stages 1 and 2 send what data parallelism sends, stage 3 1.5 times that, if
    gradients and parameters have the same dtype and the ranks are many."""
    precision = Precision("fp32", "fp32", "fp32")
    plans = {n: strategy(n, NANO, devices=4, precision=precision, batch=Batch(1, 16)) for n in ("ddp", "zero1", "zero2", "zero3")}
    totals = {name: wire_bytes(plan, NANO).total - AGREE for name, plan in plans.items()}
    assert totals["zero1"] == totals["zero2"] == totals["ddp"]
    assert totals["zero3"] == 1.5 * totals["ddp"]
