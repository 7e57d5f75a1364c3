"""What the operations of a block do, against bytes counted by hand from its number of elements."""

from dataclasses import replace

import pytest

import fullshard as fs
from fullshard.planner.memory.peak_memory import steady
from fullshard.planner.step.effects import Allocate, AllocateRow, Collective, Effects, FreeAll, KernelWork, Rename
from fullshard.planner.step.lowering import Lowering
from fullshard.planner.step.offload_bytes import offload_bytes
from fullshard.planner.step.schedule import Operation, schedule
from fullshard.planner.step.xla_lowering import lowering

MODEL = fs.presets.describe("llama-nano")


def lowered(plan: fs.Plan, *, gpu: bool = True, engine: str = "torch") -> list[tuple[Operation, Effects]]:
    away = offload_bytes(plan, MODEL, 2)
    return lowering(plan, away, engine=engine, gpu=gpu).step(schedule(plan, MODEL, engine=engine))


def one(plan: fs.Plan, kind: str, **how: object) -> Effects:
    unit = next(u.name for u in plan.units if u.name.endswith(".1"))
    return next(effects for op, effects in lowered(plan, **how) if (op.kind, op.unit) == (kind, unit))  # type: ignore[arg-type]


def zero3(**choices: object) -> fs.Plan:
    given = {"devices": 4, "batch": fs.Batch(1, 64), "precision": fs.Precision("bf16")} | choices
    return fs.zero3(MODEL, **given)  # type: ignore[arg-type]


def elements() -> int:
    return sum(p.numel for u in MODEL.units if u.name.endswith(".1") for p in u.parameters)


def test_a_gather_casts_its_shard_and_sends_the_whole():
    found, n = one(zero3(), "gather"), elements()
    flat, buffer, freed = found.events
    assert isinstance(flat, Allocate)
    assert isinstance(buffer, Allocate)
    assert (flat.nbytes, buffer.nbytes, freed) == (2 * n // 4, 2 * n, (flat.owner, "flat"))
    assert found.collective == Collective("gather", "all_gather", 2 * n, 4, "shard")
    assert found.kernels == KernelWork("copies", (("copy", n // 4 * (4 + 2)),))


def test_a_gather_in_the_master_dtype_casts_nothing():
    found = one(zero3(precision=fs.Precision("fp32")), "gather")
    assert [type(e) for e in found.events] == [Allocate]


def test_an_offloaded_shard_is_fetched_gathered_as_it_is_and_freed():
    plan = zero3(home=fs.Home("host", "host"))
    fetched, gathered = one(plan, "fetch"), one(plan, "gather")
    (shard,) = fetched.events
    assert isinstance(shard, Allocate)
    assert (shard.tensor, shard.nbytes) == ("shard", 2 * elements() // 4)
    assert [e[1] for e in gathered.events] == ["buffer", "shard"]
    assert gathered.kernels == KernelWork("copies", (("copy", 0),))


def test_a_quantised_gather_sends_its_message_and_packs():
    plan = zero3(wire=fs.Wire(gather="int8"))
    found = one(plan, "gather")
    assert found.collective is not None
    assert found.collective.packing is not None
    assert elements() < found.collective.nbytes < 2 * elements()
    assert found.collective.packing.packed * 4 == found.collective.packing.unpacked == elements()


def test_one_rank_takes_its_gradients_as_they_are():
    """A GPU's update reads them in the compute dtype, a CPU's casts them first; XLA leaves them to the update."""
    plan = zero3(devices=1)
    on_gpu, on_cpu, by_xla = one(plan, "reduce"), one(plan, "reduce", gpu=False), one(plan, "reduce", engine="jax")
    assert {type(e) for e in on_gpu.events} == {Rename, FreeAll}
    assert on_gpu.kernels is not None
    assert sum(moved for _, moved in on_gpu.kernels.moved) == 0
    assert {type(e) for e in on_cpu.events} == {Allocate, FreeAll}
    assert on_cpu.kernels is not None
    assert on_cpu.kernels.moved == (("copy", elements() * (2 + 4)),)
    assert {type(e) for e in by_xla.events} == {Rename}
    assert not any(found.collective for found in (on_gpu, on_cpu, by_xla))


def test_gradients_of_earlier_micro_batches_are_read_in_the_reduce_dtype():
    plan = zero3(batch=fs.Batch(1, 64, accumulate=2, sync="last"))
    reductions = [effects for op, effects in lowered(plan) if op.kind == "reduce"]
    at_once = [effects for op, effects in lowered(zero3()) if op.kind == "reduce"]
    assert {e.kernels.moved[0][0] for e in reductions if e.kernels} == {"join"}
    assert {e.kernels.moved[0][0] for e in at_once if e.kernels} == {"widen"}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_what_a_step_allocates_it_frees(strategy):
    """But what rests: optimizer state, which the first step makes."""
    plan = fs.strategy(strategy, MODEL, devices=4, batch=fs.Batch(1, 64, accumulate=3), precision=fs.Precision("bf16"))
    alive = steady(plan, MODEL, schedule(plan, MODEL), 2).alive
    assert {owner for owner, _ in alive} <= {"rest", "workspace"}


def test_an_operation_does_the_same_in_every_micro_batch_between():
    plan = zero3(batch=fs.Batch(1, 64, accumulate=4))
    gathers = [effects for op, effects in lowered(plan) if op.kind == "gather" and op.unit.endswith(".1")]
    assert len(gathers) > 4
    assert all(found is gathers[0] for found in gathers[:3])


def test_updates_that_a_backlog_waits_for_are_named():
    plan = replace(zero3(home=fs.Home("device", "host")), backlog=1)
    away = offload_bytes(plan, MODEL, 2, clip=False)
    step = Lowering(plan, away, gpu=True).step(schedule(plan, MODEL, clip=False))
    updates = [(op.unit, effects.waited) for op, effects in step if op.kind == "update" and op.unit]
    assert [waited for _, waited in updates[1:]] == [(unit,) for unit, _ in updates[:-1]]


def test_rows_are_allocated_under_their_owner():
    found = one(zero3(), "unpack").events[0]
    assert isinstance(found, AllocateRow)
    assert sum(found.row) == 2 * elements()


def test_agreements_of_other_sizes_are_told_apart():
    """The tokens of a step, then its norm and loss."""
    sent = [e.collective.nbytes for op, e in lowered(zero3()) if op.kind == "all_reduce" and e.collective]
    assert sent == [8, 48]
