"""The planner on a tensor axis, held against the engine as it really runs (rank 0 of N, fake process group)."""

import dataclasses
from functools import lru_cache

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard import on_torch
from fullshard.model.costs import AXIS_COLLECTIVES, evaluate
from fullshard.model.presets import GPTSize, LlamaSize
from fullshard.on_torch.model.built_in import GPT, Llama
from fullshard.planner.memory import peak_memory, section_events
from fullshard.planner.search.plan_space import PlanRequest, strategies
from fullshard.planner.step.schedule import schedule
from fullshard.planner.time.timeline import timeline
from fullshard.planner.wire_bytes import sent_bytes, wire_bytes
from tests.cpu import live
from tests.cpu.test_planner import _peak, _without_cuda

ROWS, TOKENS = 2, 32
SIZE = LlamaSize(dim=32, layers=3, heads=4, kv_heads=2, ffn=44, vocab=50, sequence=64)
LOSSES = {"plain": on_torch.summed_loss, "chunked": on_torch.chunked_loss}
WORDS = {"all_reduce": "all_reduce", "all_gather": "gather", "reduce_scatter": "reduce"}


def build(vocab: int) -> nn.Module:
    with torch.device("meta"):
        return Llama(dataclasses.replace(SIZE, vocab=vocab))


@lru_cache
def description(vocab: int) -> fs.Description:
    return on_torch.describe(build(vocab), micro_batch=ROWS, sequence=TOKENS, tensor=(2,))


def plan(strategy: str, vocab: int = 50, **arguments) -> fs.Plan:
    batch = arguments.pop("batch", fs.Batch(ROWS, TOKENS))
    return fs.strategy(strategy, description(vocab), precision=fs.Precision(compute="bf16"), batch=batch, tensor=2, **arguments)


CASES = {  # a vocabulary of 51 cannot be split: its head stays whole
    "zero3": (50, "plain", ("zero3",), {"devices": 4}),
    "zero3-full": (50, "plain", ("zero3",), {"devices": 8, "remat": "full"}),
    "zero3-selective": (50, "plain", ("zero3",), {"devices": 4, "remat": "selective"}),
    "split head": (50, "chunked", ("zero3",), {"devices": 4}),
    "ddp": (50, "plain", ("ddp",), {"devices": 4}),
    "hybrid": (50, "plain", ("hybrid",), {"replicate": 2, "shard": 2}),
    "accumulated": (50, "plain", ("zero2",), {"devices": 4, "batch": fs.Batch(ROWS, TOKENS, 3)}),
    "whole head": (51, "chunked", ("zero3", 51), {"devices": 4}),
}
QUICK = {"zero3", "zero3-full", "split head"}
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES]


@pytest.fixture(autouse=True)
def _fresh():
    yield
    section_events.sized_events.cache_clear()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NAMES)
def test_collectives_and_the_peak_are_those_of_the_engine(name, monkeypatch):
    vocab, loss, arguments, options = CASES[name]
    wanted = plan(*arguments, **options)
    operations = schedule(wanted, description(vocab), loss=loss)
    ran = live.run_step(build(vocab), wanted, LOSSES[loss], vocab)
    assert [c for op in operations for c in _collectives(op)] == ran.collectives
    sent = wire_bytes(wanted, description(vocab), loss=loss)
    assert sent.total == pytest.approx(sum(sent_bytes(*c) for c in ran.collectives))
    assert sent.axis > 0
    _without_cuda(monkeypatch)
    tape = peak_memory.steady(wanted, description(vocab), operations, slots=2)
    assert abs(_peak(tape) - ran.peak) <= 64  # bytes: counters and factors of the step itself


def _collectives(op) -> list[tuple[str, int, int]]:
    if op.section is not None:
        return [(WORDS[o.kind], evaluate(o.moved, ROWS, TOKENS), 2) for o in op.section.ops if o.kind in AXIS_COLLECTIVES]
    return [(op.kind, op.nbytes, op.ranks)] if op.kind in ("gather", "reduce", "all_reduce") and op.ranks > 1 else []


def test_a_rank_holds_its_part_and_waits_for_the_others():
    wanted = plan("zero3", devices=4)
    rows = 16 + 8 + 8 + 22 + 22  # of queries, keys, values, gate and up on a rank of the tensor axis
    block = (rows * 32 + 32 * 16 + 32 * 22) // 2  # and half of them by FSDP
    norms, tables = 7 * 32 // 2, 2 * 13 * 32  # norms are whole on the tensor axis; 25 rows of a vocabulary are 13 and 12
    assert peak_memory.at_rest(wanted, description(50), 2)["device"]["params"] == 4 * (3 * block + norms + tables)
    cluster = fs.Cluster.load("4xh100")
    found = timeline(wanted, description(50), cluster, loss="plain")
    assert found.busy["tensor"] > 0
    assert found.exposed["tensor"] == pytest.approx(found.busy["tensor"])


def test_the_search_tries_tensor_axes_that_were_traced():
    wanted = PlanRequest(description(50), fs.Cluster.load("4xh100"), TOKENS, 4, loss="plain")
    assert {plan.mesh.tensor for strategy in strategies(wanted) for family in strategy.families for _, plan in family} == {1, 2}
    fixed = fs.find_plan(
        description(50), fs.Cluster.load("4xh100"), sequence=TOKENS, global_batch=4, loss="plain", fix={"tensor": 2}
    )
    assert fixed.plan.mesh.tensor == 2


def test_what_cannot_be_split_or_was_not_traced_is_refused_in_a_sentence():
    other = dataclasses.replace(plan("zero3", devices=4), mesh=fs.Mesh(shard=1, tensor=4))
    with pytest.raises(fs.FullshardError, match=r"not traced for mesh.tensor = 4 \(traced: 2\)"):
        schedule(other, description(50), loss="plain")
    with torch.device("meta"):
        gpt = GPT(GPTSize(dim=30, layers=2, heads=3, vocab=50, sequence=64))
    with pytest.raises(fs.FullshardError, match=r"mesh.tensor = 2"):
        on_torch.describe(gpt, micro_batch=1, sequence=8, tensor=(2,))
