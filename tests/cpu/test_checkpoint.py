"""Checkpoints through the torch engine: any layout to any other, strict, verified, never half."""

import json
from pathlib import Path

import pytest

from fullshard.checkpoint.place import Local
from fullshard.checkpoint.verify import problems
from tests.cpu import checkpoint

FROM = [(4, "zero3", {}), (2, "ddp", {}), (4, "hybrid", {}), (4, "zero1", {"tensor": 2}), (4, "mixed", {"replicate_below": 2000})]
TO = [(1, "zero3", {}), (2, "zero2", {}), (4, "ddp", {}), (4, "hybrid", {"tensor": 2}), (4, "hpz", {"reshard": 2})]


@pytest.mark.parametrize(("world", "strategy", "choices"), FROM)
def test_what_any_layout_saves_any_other_loads_to_the_bit(ranks, tmp_path, world, strategy, choices):
    saved = ranks(world).run(checkpoint.save, str(tmp_path), strategy, **choices)
    assert len({json.dumps(s["digests"]) for s in saved}) == 1
    assert problems(Local(Path(saved[0]["where"]))) == []
    for other, another, others in [*TO, (world, strategy, choices)]:
        for found in ranks(other).run(checkpoint.load, str(tmp_path), another, **others):
            assert found["digests"] == saved[0]["digests"]
            assert (found["step"], found["cursor"], found["note"]) == (2, 24, "ä")
    assert found["next"] == saved[0]["next"]  # the same layout again: training goes on to the bit
