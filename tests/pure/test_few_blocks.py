"""Blocks that are counted instead of played: the result is that of all blocks, to the byte and to rounding."""

import random
from typing import Any

import pytest

import fullshard as fs
from fullshard.cluster.topology import Cluster
from fullshard.model import presets
from fullshard.plan.plan import Plan
from fullshard.planner.memory.peak_memory import peak_bytes
from fullshard.planner.step import few_blocks
from fullshard.planner.strategies import choose
from fullshard.planner.time.timeline import Timeline, timeline

MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "gpt2-xl", "gpt3-175b", "llama3.2-1b")
CLUSTERS = ("1xh100", "8xh100", "8xa100", "64xh100", "4096xh100")


def drawn(seed: int) -> tuple[Plan, Any, Cluster, dict[str, Any]]:
    """A plan of random choices, some of them for a part of the blocks."""
    pick = random.Random(seed)
    description, cluster = presets.describe(pick.choice(MODELS)), Cluster.named(pick.choice(CLUSTERS))
    accumulate, count = pick.choice((1, 2, 8)), cluster.devices
    names = ["zero3"] if count == 1 else ["ddp", "zero1", "zero2", "zero3", "zero3", "hybrid", "hpz"]
    name = pick.choice(names)
    own = {"hybrid": {"replicate": max(2, count // 8)}, "hpz": {"reshard": max(2, min(8, count // 2))}}.get(name, {})
    late = accumulate > 1 and name != "zero1" and pick.random() < 0.5
    batch = fs.Batch(pick.choice((1, 2, 4)), pick.choice((256, 1024, 8192)), accumulate, "last" if late else "every")
    remat = pick.choice(("none", "selective", "full"))
    plan = choose(
        name,
        description,
        devices=count,
        **own,
        batch=batch,
        precision=fs.Precision(pick.choice(("bf16", "fp32")), pick.choice(("bf16", "fp32"))),
        remat=remat,
        compile=pick.random() < 0.5,
        prefetch=fs.Prefetch(2, 2) if pick.random() < 0.5 and name != "ddp" else fs.Prefetch(),
    )
    blocks = [u.name for u in description.units if u.kind == "block"]
    for block in blocks[: pick.randrange(len(blocks))] if pick.random() < 0.3 else ():
        plan = plan.change(block, remat="none")
    common = {"loss": pick.choice(("chunked", "plain")), "clip": pick.random() < 0.5}
    return plan, description, cluster, common | {"engine": pick.choice(("torch", "torch", "jax")), "cpu_share": 0.5}


def apart(one: Timeline, other: Timeline) -> float:
    """The largest difference of any time, as a share of the step."""
    tables = [(getattr(one, t), getattr(other, t)) for t in ("busy", "exposed", "compute")]
    differences = [abs(a.get(k, 0.0) - b.get(k, 0.0)) for a, b in tables for k in {*a, *b}]
    return max(abs(one.seconds - other.seconds), *differences) / other.seconds


@pytest.mark.parametrize("seed", range(40))
def test_few_blocks_are_all_blocks(seed, monkeypatch):
    plan, description, cluster, common = drawn(seed)
    time, peak = timeline(plan, description, cluster, **common), peak_bytes(plan, description, **common)
    monkeypatch.setattr(few_blocks, "COUNTS", ())
    assert peak == peak_bytes(plan, description, **common)
    assert apart(time, timeline(plan, description, cluster, **common)) < 1e-12


def test_most_plans_need_few_blocks(monkeypatch):
    """Of 8 and 70 billion parameters in their usual plans no more than 12 blocks are played."""
    played: list[int] = []
    whole = few_blocks.schedule
    monkeypatch.setattr(
        few_blocks, "schedule", lambda plan, *rest, **more: played.append(len(plan.units)) or whole(plan, *rest, **more)
    )
    for model in ("llama3-8b", "llama3-70b"):
        for remat in ("none", "full"):
            plan = fs.zero3(presets.describe(model), devices=64, batch=fs.Batch(2, 4096, 2), remat=remat)
            timeline(plan, presets.describe(model), Cluster.named("64xh100"))
            peak_bytes(plan, presets.describe(model))
    assert max(played) <= 12 + 2


def test_blocks_of_two_kinds_in_turn_are_all_played():
    """Between two equal blocks lies another: none stands for its neighbours."""
    description = presets.describe("llama3-8b")
    plan = fs.zero3(description, devices=8, batch=fs.Batch(1, 4096), remat="full", remat_every=2)
    assert few_blocks.few_blocks(plan, description, 6) is None
    alike = fs.zero3(description, devices=8, batch=fs.Batch(1, 4096), remat="full")
    few = few_blocks.few_blocks(alike, description, 6)
    assert few is not None
    assert few.left_out == [24]  # the first and the last meet other neighbours
    assert len(few.plan.units) == len(alike.units) - 24
