"""The planner's schedule and memory, held against the engine as it really runs (rank 0 of N, fake process group)."""

import dataclasses
from functools import lru_cache
from itertools import accumulate

import pytest
import torch
from peft import LoraConfig, get_peft_model

import fullshard as fs
from fullshard import on_torch
from fullshard.model import kernel_workspaces
from fullshard.model.costs import evaluate
from fullshard.model.presets import LlamaSize
from fullshard.on_torch.loss import chunked_loss
from fullshard.on_torch.model.built_in import Llama
from fullshard.on_torch.parallelize.remat import apply_remat
from fullshard.on_torch.tracing.cuda_kernels import FusedKernels
from fullshard.planner.memory import allocation_tape as tape
from fullshard.planner.memory import peak_memory, section_events
from fullshard.planner.step.schedule import CHUNK_BUDGET, CHUNK_BYTES, CHUNK_TILE, SPLIT_CHUNK_BYTES, schedule
from fullshard.planner.wire_bytes import sent_bytes, wire_bytes
from tests.cpu import live

ROWS, TOKENS, VOCAB = 2, 32, 50
# Heads of a size that CUDA's attention takes; no dim divides by 8: shards are uneven.
SIZE = LlamaSize(dim=24, layers=3, heads=3, kv_heads=1, ffn=42, vocab=VOCAB, sequence=64)
LOSSES = {"plain": on_torch.summed_loss, "chunked": on_torch.chunked_loss}
BF16 = fs.Precision(compute="bf16")


def build(kind: str, **change) -> torch.nn.Module:
    with torch.device("meta"):
        model = Llama(dataclasses.replace(SIZE, tied=kind == "tied", **change))
        return model if kind != "lora" else get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


@lru_cache
def description(kind: str) -> fs.Description:
    return on_torch.describe(build(kind), micro_batch=ROWS, sequence=TOKENS, compute="fp32" if kind == "fp32" else "bf16")


def plan(strategy: str, kind: str = "plain", batch: fs.Batch = fs.Batch(ROWS, TOKENS), **arguments) -> fs.Plan:  # noqa: B008
    return fs.strategy(strategy, description(kind), precision=arguments.pop("precision", BF16), batch=batch, **arguments)


ACCUMULATED = fs.Batch(ROWS, TOKENS, 3)
LAST = fs.Batch(ROWS, TOKENS, 4, "last")
CASES = {
    "zero3": (plan, ("zero3",), {"devices": 8}),
    "zero3-one": (plan, ("zero3",), {"devices": 1}),
    "one-accumulated": (plan, ("zero3",), {"devices": 1, "batch": ACCUMULATED}),
    "one-last": (plan, ("ddp",), {"devices": 1, "batch": LAST}),
    "one-fp32": (plan, ("zero3", "fp32"), {"devices": 1, "precision": fs.Precision(compute="fp32")}),
    "zero3-full": (plan, ("zero3",), {"devices": 64, "remat": "full"}),
    "zero3-selective": (plan, ("zero3",), {"devices": 4, "remat": "selective"}),
    "zero3-every-second": (plan, ("zero3",), {"devices": 4, "remat": "full", "remat_every": 2}),
    "zero3-prefetch": (plan, ("zero3",), {"devices": 4, "prefetch": fs.Prefetch(2, 3)}),
    "zero3-accumulated": (plan, ("zero3",), {"devices": 4, "batch": ACCUMULATED}),
    "zero3-last": (plan, ("zero3",), {"devices": 4, "batch": LAST}),
    "zero3-reduce-bf16": (plan, ("zero3",), {"devices": 4, "precision": fs.Precision("bf16", "bf16")}),
    "zero3-reduce-bf16-last": (plan, ("zero3",), {"devices": 4, "batch": LAST, "precision": fs.Precision("bf16", "bf16")}),
    "zero2": (plan, ("zero2",), {"devices": 8}),
    "zero1": (plan, ("zero1",), {"devices": 8, "batch": ACCUMULATED}),
    "ddp": (plan, ("ddp",), {"devices": 4}),
    "hybrid": (plan, ("hybrid",), {"replicate": 2, "shard": 4}),
    "hpz": (plan, ("hpz",), {"devices": 8, "reshard": 2}),
    "mixed": (plan, ("mixed",), {"devices": 4, "replicate": ["embed"]}),
    "tied": (plan, ("zero3", "tied"), {"devices": 4}),
    "lora": (plan, ("zero3", "lora"), {"devices": 4, "remat": "full"}),
    "tied-full": (plan, ("zero3", "tied"), {"devices": 4, "remat": "full"}),
    "tied-selective": (plan, ("zero3", "tied"), {"devices": 4, "remat": "selective"}),
    "fp32-full": (plan, ("zero3", "fp32"), {"devices": 4, "remat": "full", "precision": fs.Precision(compute="fp32")}),
}
QUICK = {"zero3", "zero3-full", "zero3-accumulated", "zero2", "zero1", "ddp", "hybrid", "hpz"}  # one trace serves them all
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES]
EITHER_LOSS = {"zero3", "zero3-full", "tied", "tied-full", "tied-selective", "lora", "zero3-accumulated"}


def case(name: str) -> tuple[str, fs.Plan]:
    make, arguments, options = CASES[name]
    return (arguments[1] if len(arguments) > 1 else "plain"), make(*arguments, **options)


@lru_cache
def ran(name: str, loss: str) -> live.Step:
    kind, wanted = case(name)
    return live.run_step(build(kind), wanted, LOSSES[loss], VOCAB)


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_issues_the_collectives_that_the_engine_issues(name):
    kind, wanted = case(name)
    planned = [
        (op.kind, op.nbytes, op.ranks)
        for op in schedule(wanted, description(kind), loss="chunked")
        if op.kind in ("gather", "reduce", "all_reduce") and op.ranks > 1
    ]
    assert planned == ran(name, "chunked").collectives
    sent = sum(sent_bytes(*c) for c in ran(name, "chunked").collectives)
    assert wire_bytes(wanted, description(kind)).total == pytest.approx(sent)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_that_of_the_storages_alive(name, loss, monkeypatch):
    if loss == "plain" and name not in EITHER_LOSS:
        pytest.skip("the loss does not know the strategy")
    _without_cuda(monkeypatch)
    kind, wanted = case(name)
    operations = schedule(wanted, description(kind), loss=loss)
    tape = peak_memory.steady(wanted, description(kind), operations, slots=2)
    assert abs(_peak(tape) - ran(name, loss).peak) <= 64  # bytes: counters and factors of the step itself


def _peak(tape: tape.Tape) -> int:
    return max(accumulate(d if term != "workspace" else 0 for d, term in zip(tape.deltas, tape.terms, strict=True)))


def _without_cuda(monkeypatch) -> None:
    """CPU kernels have other temporaries, or none."""
    for rule in kernel_workspaces.WORKSPACES:
        monkeypatch.setitem(kernel_workspaces.WORKSPACES, rule, lambda *_: ())
    monkeypatch.setitem(kernel_workspaces.WORKSPACES, "chunk_cat", lambda *_: (0,))
    section_events.sized_events.cache_clear()


@pytest.fixture(autouse=True)
def _fresh():
    yield
    section_events.sized_events.cache_clear()


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_block_saves_what_autograd_says_it_saves(remat):
    model = build("plain").to(torch.bfloat16)
    block = model.model.layers[1]
    apply_remat(block, remat)
    x = torch.empty(ROWS, TOKENS, SIZE.dim, dtype=torch.bfloat16, device="meta", requires_grad=True)
    tables = [torch.empty(TOKENS, SIZE.head_dim // 2, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    saved: dict[int, tuple[int, object]] = {}

    def pack(t):
        storage = t.untyped_storage()
        saved[storage._cdata] = (storage.nbytes(), storage)
        return t

    parameters = {p.untyped_storage()._cdata for p in block.parameters()}
    if remat == "none":
        with FusedKernels(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            block(x, *tables)
        kept = sum(n for key, (n, _) in saved.items() if key not in parameters)
    else:
        kept = sum(t.nbytes for t in (x, *tables))
    assert _traced_saved(remat) == kept


def _traced_saved(remat: str) -> int:
    """Bytes that a middle block adds between forward and backward, its input included, its output not."""
    found = description("plain").costs.trace("bf16", "chunked", remat)
    alive: dict[str, int] = {}
    for phase in ("enter", "forward", "leave"):
        for e in found.by_phase[phase, "model.layers.1"].events:
            if e.action == "allocate" and not e.unit:
                alive[e.tensor] = evaluate(e.size[0], ROWS, TOKENS)
            elif e.action == "free" and not e.unit:
                alive.pop(e.tensor, None)
    return sum(alive.values())  # the output has the input's size


def test_attention_by_products_is_attention():
    q, k, v = (torch.randn(2, heads, 8, 4) for heads in (6, 2, 2))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with FusedKernels():
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, wanted)


def test_a_compiled_block_keeps_no_product_that_backward_never_reads():
    """The feed-forward's last: selective remat keeps it, and nothing but a sum reads it."""
    kept = _traced_saved("selective") - _traced_saved("compiled selective")
    assert kept == ROWS * TOKENS * SIZE.dim * 2


def test_chunks_are_cut_as_the_engine_cuts_them():
    assert (CHUNK_BUDGET, CHUNK_TILE) == (chunked_loss.BUDGET, chunked_loss.TILE)
    assert (CHUNK_BYTES, SPLIT_CHUNK_BYTES) == (chunked_loss.BYTES_PER_LOGIT, chunked_loss.BYTES_PER_SPLIT_LOGIT)


@pytest.mark.full
def test_blocks_that_stood_aside_cost_what_blocks_cost(monkeypatch):
    found = on_torch.describe(build("plain", layers=6), micro_batch=ROWS, sequence=TOKENS)
    wanted = fs.zero3(found, devices=4, precision=BF16, batch=fs.Batch(ROWS, TOKENS), remat="full", remat_every=2)
    measured = live.run_step(build("plain", layers=6), wanted, on_torch.chunked_loss, VOCAB)
    _without_cuda(monkeypatch)
    tape = peak_memory.steady(wanted, found, schedule(wanted, found, loss="chunked"), slots=2)
    assert abs(_peak(tape) - measured.peak) <= 64


@pytest.mark.oldest_torch  # which has a wrong meta kernel
def test_describing_leaves_the_model_as_it_was():
    model = build("plain")
    before = {n: (id(p), p.dtype) for n, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    on_torch.describe(model, micro_batch=1, sequence=8)
    assert {n: (id(p), p.dtype) for n, p in model.named_parameters()} == before
    assert [type(m) for m in model.modules()] == classes
    assert not any("forward" in vars(m) for m in model.modules())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
