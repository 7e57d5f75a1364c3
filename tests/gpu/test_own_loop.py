"""The caller's own loop on a GPU, with every home: the same code as on CPU ranks, one rank over NCCL. Run by hand:

python -m pytest tests/gpu/test_own_loop.py
"""

from itertools import pairwise

import pytest

from fullshard.plan.plan import Home
from tests.cpu import own_loop
from tests.cpu.homes import Case
from tests.cpu.ranks import Ranks
from tests.cpu.test_own_loop import BESIDE, BOTH, DISK, EVERY, HOST, PLAIN

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def ranks():
    group = Ranks(1, "cuda")
    yield group
    group.stop()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_with_every_home_the_weights_are_those_of_an_unsharded_run_by_torch(ranks, share):
    """To the rounding between the CPU's and the GPU's fused AdamW, and of a GPU's sums. Activations of this size stay on a
    GPU, which refuses another home for them: test_activations.py has larger ones."""
    homes = [home for home in EVERY if home.activations == "device"]
    cases = [Case((home,), optimizer=PLAIN, steps=own_loop.STEPS, share=share) for home in homes]
    for case, apart in zip(cases, ranks.run(own_loop.from_torch, cases)[0], strict=True):
        assert apart < 1e-3, case


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_own_loop_in_bf16_is_close_to_train_step(ranks, accumulate):
    """Two runs of one program differ on a GPU, and in bf16 a rounding is an update."""
    homes = [(HOST,), (BESIDE,), (BOTH,), (Home("host", "device"),), (HOST, Home(), DISK, BESIDE)]
    cases = [Case(h, compute="bf16", accumulate=accumulate, clip=c, steps=4) for h in homes for c in (None, 1.0)]
    for case, (resident, engine, steps) in zip(
        cases, ranks.run(own_loop.from_the_device, cases, distance=own_loop.far)[0], strict=True
    ):
        assert resident < 2e-3, case
        assert engine < 2e-3, case
        assert steps == 4


def test_checkpoints_and_dcp_hold_what_own_steps_trained(ranks, tmp_path):
    cases = [Case((h,), compute="bf16", steps=2, share=s) for h in (HOST, BESIDE, BOTH, Home()) for s in (0.0, 1.0)]
    for found in ranks.run(own_loop.saved, cases, str(tmp_path / "saved"))[0]:
        assert found["apart"] == 0.0
        assert found["moved"] > 1e-3
    pairs = list(pairwise(cases))
    for pair, found in zip(pairs, ranks.run(own_loop.through_dcp, pairs, str(tmp_path / "dcp"))[0], strict=True):
        assert found["loaded"] == 0.0, pair


@pytest.mark.parametrize("clip", [None, 1.0])
def test_own_steps_and_the_engines_in_turn(ranks, clip):
    case = Case((HOST, DISK, Home(), BESIDE), compute="bf16", clip=clip)
    apart, own, engine = ranks.run(own_loop.mixed, case, own_loop.far)[0]
    assert apart < 2e-3
    assert own == engine == 6


def test_gradients_scaled_by_torchs_grad_scaler(ranks):
    for _, scale, plain, steps, finite in ranks.run(own_loop.scaled, Case((HOST, BESIDE, Home()), compute="fp16", accumulate=1))[
        0
    ].values():
        assert scale == plain == 2.0**11
        assert steps == 4
        assert finite
