"""The collectives of compiled steps are those of the schedule; HLO text is read right; what should not be is found."""

from dataclasses import replace

import pytest

import fullshard as fs
from fullshard import on_jax
from fullshard.model.presets import describe as describe_preset
from fullshard.on_jax.communication.hlo_collectives import CompiledCollective, collectives_of
from fullshard.on_jax.step.compiled_collectives import compare
from fullshard.planner.step.schedule import schedule
from tests.jax.test_on_jax import LR, ROWS, STRATEGIES, batch, llama, make_plan


def checked(strategy: str, accumulate: int = 1, **choices) -> tuple[on_jax.State, on_jax.CollectiveCheck]:
    state = on_jax.shard(llama, make_plan(llama, strategy, accumulate, **choices), fs.AdamW(lr=LR))
    size = ROWS // accumulate
    parts = [{k: v[i * size : (i + 1) * size] for k, v in batch(0).items()} for i in range(accumulate)]
    return state, on_jax.check_collectives(state, parts)


def quick(strategy: str):
    return strategy if strategy in ("hybrid", "mixed") else pytest.param(strategy, marks=pytest.mark.full)


@pytest.mark.parametrize("strategy", [quick(s) for s in STRATEGIES])
def test_a_step_moves_what_the_schedule_says(strategy):
    """By hand, in fp32: a sharded unit is gathered once, and again for backward if it is freed; its gradient is reduced once."""
    state, found = checked(strategy)
    assert found.differences == ()
    mesh, units = state.plan.mesh, {u.name: 4 * u.numel for u in on_jax.describe(llama).units}
    for unit, traffic in zip(state.plan.units, found.units, strict=True):
        nbytes = units[unit.name]
        replicated = unit.layout == "replicated"
        times = 0 if replicated else 2 if unit.reshard else 1
        again = nbytes if times == 2 and unit.name == "embed" else 0  # the gradient of an embedding does not need it
        assert traffic.gathered == (times * nbytes, times * nbytes - again), unit.name
        assert traffic.reduced == (0, 0) if replicated else (nbytes, nbytes), unit.name
        copies = nbytes if replicated else nbytes // mesh.shard if mesh.replicate > 1 else 0
        assert traffic.copies == (copies, copies), unit.name
    assert ("all_gather" in found.counts) == (strategy != "ddp")
    text = str(found)
    assert "the compiled step moves what the schedule says" in text
    assert ("embed: 8.00 KiB are not gathered again" in text) == (strategy in ("zero3", "hybrid"))
    assert ("XLA on cpu writes a reduce-scatter as an all-reduce and a slice" in text) == (strategy != "ddp")


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_micro_batches_are_counted(strategy):
    _, one = checked(strategy)
    _, four = checked(strategy, 4)
    assert four.differences == ()
    assert "XLA moved it out" not in str(four)
    before = {u.unit: u for u in one.units}
    for traffic in four.units:
        assert traffic.gathered[1] == before[traffic.unit].gathered[1] * (4 if strategy == "zero3" else 1)
        assert traffic.reduced == tuple(4 * nbytes for nbytes in before[traffic.unit].reduced)


def test_traffic_that_should_not_be_is_found():
    state = on_jax.shard(llama, make_plan(llama, "zero2"), fs.AdamW(lr=LR))
    nbytes = {u.name: 4 * u.numel for u in on_jax.describe(llama).units}
    right = [
        CompiledCollective(kind, n, ("shard",), 1, unit, operation=f"{kind}{unit}")
        for unit, n in nbytes.items()
        for kind in ("all_gather", "reduce_scatter")
    ]
    assert compare(state, right).differences == ()
    assert compare(state, right).notes == ()
    assert compare(state, right).counts == {"all_gather": 4, "reduce_scatter": 4}
    bf16 = replace(state, plan=replace(state.plan, precision=fs.Precision(compute="bf16")))
    halves = [replace(c, nbytes=c.nbytes // 2) for c in right]
    assert compare(bf16, halves).differences == ()
    assert "embed: reduces 4.00 KiB, not 8.00 KiB: XLA reduces matrix products in bf16" in compare(bf16, halves).notes
    four = replace(state, plan=replace(state.plan, batch=replace(state.plan.batch, accumulate=4)))
    each = [replace(c, times=4) for c in right]
    hoisted = [right[0], *each[1:]]
    assert compare(four, each).notes == compare(four, each).differences == compare(four, hoisted).differences == ()
    assert compare(four, hoisted).notes == ("embed: gathered once for all 4 micro-batches: XLA moved it out of their loop",)
    lost, doubled = right[1:], [*right[1:], replace(right[0], times=2)]
    stray = [*right, CompiledCollective("all_reduce", 4096, ("shard",), 1, "")]
    numbers = [*right, CompiledCollective("all_reduce", 4, ("shard",), 1, "", number=True)]
    assert compare(state, lost).differences == ("embed: gathers 0 B, not 8.00 KiB",)
    assert compare(state, doubled).differences == ("embed: gathers 16.00 KiB, not 8.00 KiB",)
    assert compare(state, stray).differences == ("4.00 KiB are moved that are no unit's parameters or gradients",)
    assert compare(state, numbers).differences == ()


def test_the_schedule_is_that_of_the_planner():
    """For a preset, whose costs are traced from torch: the same gathers and reductions as for the order of units alone."""
    from fullshard.on_jax.model.built_in import NnxLlama
    from fullshard.on_jax.step.compiled_collectives import _scheduled

    make = lambda rngs: NnxLlama(fs.presets.preset("llama-nano"), rngs=rngs)
    plan = fs.hybrid(on_jax.describe(make), replicate=2, shard=4, batch=fs.Batch(1, 16, 2), precision=fs.Precision("fp32"))
    wanted = {u.name: dict.fromkeys(("gather", "reduce", "all_reduce"), 0) for u in plan.units}
    for op in schedule(plan, describe_preset("llama-nano")):
        if op.unit and op.kind in wanted[op.unit]:
            wanted[op.unit][op.kind] += op.nbytes
    assert _scheduled(on_jax.shard(make, plan)) == wanted


# Lines as XLA writes them: for CPUs and GPUs, merged, started, inside a loop; groups as axes, as a range and as lists.
PROGRAM = """HloModule jit_step

%body.1 (p: (f32[8,4])) -> (f32[8,4]) {
  %a.1 = f32[8,4]{1,0} fusion(%p), metadata={op_name="jit(step)/unit[block]/dot_general"}
  ROOT %all-reduce.3 = f32[8,4]{1,0} all-reduce(%a.1), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
}

ENTRY %main (x: f32[2,4]) -> f32[8,4] {
  %x = bf16[2,4]{1,0} parameter(0), metadata={op_name="params"}
  %g.1 = f32[8]{0} fusion(%x), metadata={op_name="jit(step)/transpose(jvp(unit[head]))/dot"}
  %g.2 = f32[4]{0} fusion(%x), metadata={op_name="jit(step)/transpose(jvp(unit[embed]))/dot"}
  %n = f32[] fusion(%x)
  %ag = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], metadata={op_name="unit[head]/c"}
  %all-reduce.1 = (f32[8]{0}, f32[4]{0}, /*index=2*/f32[]) all-reduce(%g.1, %g.2, /*index=2*/%n), replica_groups={}, to_apply=%add
  %rs = f32[2]{0} reduce-scatter(%g.1), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, dimensions={0}
  %w = (f32[8,4]) while(%t), condition=%c, body=%body.1, backend_config={"known_trip_count":{"n":"4"}}
}
"""


def test_programs_are_read():
    found = collectives_of(PROGRAM, fs.Mesh(replicate=2, shard=4))
    seen = [(c.kind, c.nbytes, c.axes, c.times, c.unit, c.number) for c in found]
    assert seen == [
        ("all_gather", 64, ("shard",), 1, "head", False),
        ("all_reduce", 32, ("replicate", "shard"), 1, "head", False),
        ("all_reduce", 16, ("replicate", "shard"), 1, "embed", False),
        ("all_reduce", 4, ("replicate", "shard"), 1, "", True),
        ("reduce_scatter", 32, ("shard",), 1, "head", False),
        ("all_reduce", 128, ("replicate",), 4, "block", False),
    ]
