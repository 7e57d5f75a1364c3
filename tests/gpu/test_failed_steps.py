"""A step that runs out of memory on a GPU, and reads right after steps. Run by hand:

python -m pytest tests/gpu/test_failed_steps.py
"""

import tempfile
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from fullshard import on_torch
    from fullshard.plan.plan import Home
    from tests.cpu import copies, homes
    from tests.cpu.homes import Case
    from tests.cpu.ranks import Ranks

    CASES = [
        Case(compute="bf16"),
        Case(compute="bf16", strategy="ddp", sync="last"),
        Case((Home("host", "host"),), compute="bf16", reduce="bf16"),
        Case((Home("device", "host"),), compute="bf16"),
        Case((Home("disk", "disk"),), compute="bf16"),
    ]


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(1, "cuda")
    yield pool
    pool.stop()


def no_room(model, batch):
    """Runs out of memory for real, in forward."""
    hook = model.get_submodule("model.layers.1").register_forward_hook(lambda *_: torch.empty(1 << 45, device="cuda") and None)
    try:
        return on_torch.summed_loss(model, batch)
    finally:
        hook.remove()


def failed(case):
    with tempfile.TemporaryDirectory() as disk:
        runs = []
        for fails in (True, False):
            state = homes.make(case, disk)
            for i in range(4):
                batches = [{k: v.cuda() for k, v in b.items()} for b in homes.batches(state, i)]
                if fails and i:
                    try:
                        on_torch.train_step(state, batches, clip=1.0, loss=no_room)
                    except on_torch.OutOfMemory:
                        assert all(p.grad is None for p in state.model.parameters())
                        with torch.no_grad():
                            state.model(batches[0]["input_ids"])
                on_torch.train_step(state, batches, clip=1.0)
            runs.append(homes.values(state))
        return homes.apart(*runs)


@pytest.mark.parametrize("case", CASES if torch.cuda.is_available() else [], ids=str)
def test_training_goes_on_after_out_of_memory_as_if_nothing_had_been(ranks, case):
    assert ranks.run(failed, case)[0] < 2e-5


@pytest.mark.parametrize("home", ["host", "disk"])
def test_an_average_taken_right_after_a_step_is_of_its_weights(ranks, home):
    case = replace(Case((Home("device", home),)), accumulate=2)
    assert ranks.run(copies.averages, case)[0] < 1e-4
