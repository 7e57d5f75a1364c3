"""What the planner says of an expert axis, held against the engine."""

from functools import lru_cache
from itertools import accumulate

import pytest
import torch

import fullshard as fs
from fullshard import on_torch
from fullshard.model import kernel_workspaces
from fullshard.model.costs import AXIS_COLLECTIVES, evaluate
from fullshard.on_torch.parallelize import experts
from fullshard.planner.memory import peak_memory, section_events
from fullshard.planner.step.schedule import schedule
from fullshard.planner.time.collectives import collective_seconds
from tests.cpu import live

ROWS, TOKENS, EXPERTS = 4, 32, 4
BF16 = fs.Precision(compute="bf16")


def build():
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def ran(wanted: fs.Plan, monkeypatch) -> live.Step:
    """A step of the engine as rank 0, where all ranks choose experts evenly: the fake ranks send back what they are told."""
    model, exchange = build(), experts.all_to_all
    told = lambda t, mesh, *splits: exchange(t, mesh, *splits) if t.is_floating_point() else exchange(t, mesh, *splits).copy_(t)
    monkeypatch.setattr(experts, "all_to_all", told)
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, out: (*out[:2], _evenly(out[2])))
    return live.run_step(model, wanted, on_torch.summed_loss, 64)


def _evenly(chosen: torch.Tensor) -> torch.Tensor:
    return (torch.arange(chosen.numel()) % EXPERTS).view(chosen.shape)


@lru_cache
def description():
    return on_torch.describe(build(), experts=True, micro_batch=ROWS, sequence=TOKENS, expert=(2, 4))


def plan(expert: int, **common) -> fs.Plan:
    return fs.zero3(description(), devices=4, expert=expert, precision=BF16, batch=fs.Batch(ROWS, TOKENS), **common)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("expert", "remat"), [(1, "none"), (1, "full"), (2, "none"), (2, "full"), (4, "none")])
def test_the_schedule_issues_the_collectives_that_the_engine_issues(expert, remat, monkeypatch):
    wanted = plan(expert, remat=remat)
    planned = []
    for op in schedule(wanted, description(), loss="plain"):
        if op.kind in ("gather", "reduce", "all_reduce") and op.ranks > 1:
            planned.append((op.kind, op.nbytes, op.ranks))
        if op.section:
            inside = [o for o in op.section.ops if o.kind in AXIS_COLLECTIVES]
            planned += [(o.kind, evaluate(o.moved, ROWS, TOKENS), expert) for o in inside]
    assert planned == ran(wanted, monkeypatch).collectives


@pytest.mark.parametrize(("expert", "remat"), [(1, "none"), (2, "none"), (2, "full"), (4, "none")])
def test_the_peak_is_that_of_the_storages_alive(expert, remat, monkeypatch):
    for rule in kernel_workspaces.WORKSPACES:
        monkeypatch.setitem(kernel_workspaces.WORKSPACES, rule, lambda *_: ())
    monkeypatch.setitem(kernel_workspaces.WORKSPACES, "chunk_cat", lambda *_: (0,))
    section_events.sized_events.cache_clear()
    wanted = plan(expert, remat=remat)
    tape = peak_memory.steady(wanted, description(), schedule(wanted, description(), loss="plain"), slots=2)
    found = max(accumulate(d if term != "workspace" else 0 for d, term in zip(tape.deltas, tape.terms, strict=True)))
    section_events.sized_events.cache_clear()
    want = ran(wanted, monkeypatch).peak
    assert found == pytest.approx(want, rel=0.005)


def test_an_exchange_takes_its_bytes_over_the_links():
    """Inside a node every rank sends 3/4 over its own link; across nodes what leaves the node goes through its adapter."""
    inside = fs.Cluster.load("8xh200")
    link = inside.node.link
    wanted = 1e9 * 3 / 4 / (link.bandwidth * link.efficiency)
    assert collective_seconds("all_to_all", 1e9, 4, inside) == pytest.approx(wanted, rel=0.01)
    across = fs.Cluster.load("16xh200")
    network = across.network
    wanted = 1e9 * 8 / 16 / (network.bandwidth * network.efficiency)
    assert collective_seconds("all_to_all", 1e9, 16, across) == pytest.approx(wanted, rel=0.01)


def test_an_expert_axis_moves_tokens_instead_of_experts():
    cluster = fs.Cluster.load("8xh200")
    description8 = on_torch.describe(build(), experts=True, micro_batch=ROWS, sequence=TOKENS, expert=(4,))
    plans = [fs.zero3(description8, devices=8, expert=expert, precision=BF16, batch=fs.Batch(ROWS, TOKENS)) for expert in (1, 4)]
    whole, spread = (fs.estimate(p, description8, cluster, loss="plain") for p in plans)
    assert spread.lanes["experts"] > 0
    assert spread.lanes["gather"] < whole.lanes["gather"]
