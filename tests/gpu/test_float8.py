"""Float8 training on a GPU of compute capability 8.9 or above. Run by hand: python -m pytest tests/gpu/test_float8.py"""

import pytest

import fullshard as fs
from fullshard.model.presets import LlamaSize

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")
able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not able, reason="needs a GPU with float8 products")

SIZE = LlamaSize(dim=1024, layers=4, heads=8, kv_heads=4, ffn=2816, vocab=512, sequence=2048)
BATCH = fs.Batch(4, 512)
KINDS = ["tensorwise", "rowwise"]


@pytest.fixture(scope="module")
def ranks():
    from tests.cpu.ranks import Ranks

    group = Ranks(1, "cuda")
    yield group
    group.stop()


def make_plan(kind: str | None, devices: int = 1, make=fs.zero3, **more):
    from fullshard import on_torch
    from fullshard.on_torch.model.built_in import Llama

    with torch.device("meta"):
        model = Llama(SIZE)
    described = on_torch.describe(model, micro_batch=BATCH.micro_batch, sequence=BATCH.sequence)
    precision = fs.Precision("bf16", float8=kind)
    return model, described, make(described, devices=devices, batch=BATCH, precision=precision, **more)


def batch(step: int) -> dict:
    """Tokens each of which has four likely successors."""
    draw = torch.Generator().manual_seed(step)
    after = torch.randint(0, SIZE.vocab, (SIZE.vocab, 4), generator=torch.Generator().manual_seed(0))
    ids = [torch.randint(0, SIZE.vocab, (BATCH.micro_batch,), generator=draw)]
    for _ in range(BATCH.sequence):
        ids.append(after[ids[-1], torch.randint(0, 4, (BATCH.micro_batch,), generator=draw)])
    tokens = torch.stack(ids, 1)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def losses(kind: str | None, steps: int, **more) -> list[float]:
    from fullshard import on_torch

    model, _, plan = make_plan(kind, **more)
    state = on_torch.shard(model, plan, fs.AdamW(lr=1e-3), seed=1)
    step = lambda i: on_torch.train_step(state, [batch(i)], loss=on_torch.chunked_loss, clip=1.0).loss.item()
    return [step(i) for i in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compile", [False, True])
def test_it_learns_what_bf16_learns(ranks, kind, compile):
    """Until four successors of each token are known: before that, runs of one seed differ by more than float8 does."""
    plain, rounded = (ranks.run(losses, k, 120, compile=compile)[0] for k in (None, kind))
    print(kind, compile, [round(x, 3) for x in plain[::10]], [round(x, 3) for x in rounded[::10]])
    assert plain[-1] < 0.5 * plain[0]
    assert sum(rounded[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.02)
    assert rounded != plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remat", ["selective", "full"])
@pytest.mark.parametrize("compile", [False, True])
def test_remat_changes_nothing_but_rounding(ranks, kind, remat, compile):
    kept, again = (ranks.run(losses, kind, 8, compile=compile, remat=r)[0] for r in ("none", remat))
    assert again == pytest.approx(kept, rel=1e-2)


def graphs(kind: str | None, steps: int = 6) -> tuple[int, int, int]:
    """Graphs that were compiled in two steps, those compiled after, and graph breaks."""
    from torch._dynamo.utils import counters

    from fullshard import on_torch

    torch._dynamo.reset()
    counters.clear()
    model, _, plan = make_plan(kind, compile=True)
    state, seen = on_torch.shard(model, plan, fs.AdamW(lr=1e-4), seed=1), []
    for i in range(steps):
        on_torch.train_step(state, [batch(i)], loss=on_torch.chunked_loss)
        seen.append(counters["stats"]["unique_graphs"])
    return seen[1], seen[-1] - seen[1], sum(counters["graph_break"].values())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_compile_once_and_whole(ranks, kind):
    (plain,), (found,) = ranks.run(graphs, None), ranks.run(graphs, kind)
    assert found == (plain[0], 0, 0)


def as_one_of_eight(kind: str | None, make: str, remat: str) -> tuple[int, int, str]:
    """Peak bytes of a steady step of rank 0 of 8, whose collectives do nothing: measured, and predicted; and the type of a
    gathered weight."""
    import gc

    import torch.distributed as dist

    from fullshard import on_torch
    from fullshard.on_torch.private.torch_internals import fake_ranks
    from fullshard.planner.memory.peak_memory import predict

    dist.destroy_process_group()
    with fake_ranks(8):
        model, described, plan = make_plan(kind, 8, getattr(fs, make), compile=True, remat=remat)
        state = on_torch.shard(model, plan, fs.AdamW(lr=1e-6), device="cuda", first_step_checks=False)
        step = lambda i: on_torch.train_step(state, [batch(i)], loss=on_torch.chunked_loss, clip=1.0)
        for i in range(3):
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step(i)
        measured = torch.cuda.max_memory_allocated()
        block = state.model.model.layers[1]
        block.unshard()
        gathered = type(block.mlp.up_proj.weight).__name__
    return measured, predict(plan, described).allocated, gathered


@pytest.mark.parametrize(("make", "remat"), [("zero2", "none"), ("zero3", "none"), ("zero3", "selective"), ("zero3", "full")])
@pytest.mark.parametrize(("kind", "weight"), [("tensorwise", "Float8TrainingTensor"), ("rowwise", "Parameter")])
def test_weights_arrive_in_float8_and_memory_is_predicted(kind, weight, make, remat):
    from tests.cpu.ranks import Ranks

    alone = Ranks(1, "cuda")
    try:
        ((measured, predicted, gathered),) = alone.run(as_one_of_eight, kind, make, remat)
    finally:
        alone.stop()
    print(kind, make, remat, measured, predicted, f"{predicted / measured:.3f}")
    assert gathered == weight
    assert 0.97 <= predicted / measured <= 1.1, (predicted, measured)
