"""Activations in host memory and on disk on a GPU: streams and pinned memory change no bit either. Run by hand:

python -m pytest tests/gpu
"""

import pytest

from tests.cpu import activations, disk_activations
from tests.cpu.activations import Case
from tests.cpu.ranks import Ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def ranks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products that are the same every time
        group = Ranks(1, "cuda")
        yield group
        group.stop()


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("model", "accumulate", "compute", "compile"),
    [("plain", 2, "fp32", False), ("plain", 1, "bf16", False), ("llama", 1, "bf16", False), ("plain", 1, "bf16", True)],
)
def test_spilled_activations_change_no_bit(ranks, model, remat, accumulate, compute, compile):
    case = Case(model, remat, compute, accumulate, "chunked", compile=compile)
    (found,) = ranks.run(activations.small_too, activations.compare, case)
    assert found["numbers"], found
    assert found["params"]
    assert found["left"] == 0
    assert len(set(found["moved"])) == 1, found
    assert found["moved"][0][0] == found["moved"][0][1] > 0


def test_what_is_spilled_is_freed_and_the_last_block_stays(ranks):
    assert ranks.run(activations.small_too, activations.freed) == [[True, True, False]]


def test_blocks_come_back_one_ahead(ranks):
    assert ranks.run(activations.small_too, activations.ahead, "full", "*.layers.*", 5) == [[1, 2, 3, 4, 4]]


def test_forwards_without_backward_leave_nothing_behind(ranks):
    found = ranks.run(activations.small_too, activations.without_backward)
    assert found == [{"evaluated": 0, "free": True, "open": None, "same": True}]


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("homes", [("disk",), ("device", "host", "disk")])
def test_activations_on_disk_change_no_bit(ranks, homes, remat):
    case = disk_activations.Case(homes, remat, accumulate=2, compute="bf16", loss="chunked")
    (found,) = ranks.run(activations.small_too, disk_activations.compare, case, 4)
    assert found["numbers"], found
    assert found["params"]
    assert found["left"] == 0
    assert len(set(found["moved"])) == 1, found
    assert found["filed"][0] == found["filed"][1] > 0
