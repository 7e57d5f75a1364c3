"""Parameters that some ranks use, on ranks that share a GPU over gloo. Run by hand:

python -m pytest tests/gpu/test_unused_parameters.py
"""

import os
import socket

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from tests.cpu import unused


def train(rank: int, port: int, more: dict, folder: str) -> None:
    about = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {k: str(v) for k, v in about.items()}
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("cpu:gloo,cuda:gloo")
    torch.save(unused.apart("zero3", never=True, device="cuda", **more), f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("more", [{}, {"own": True}, {"parts": 2, "clip": 1e9}], ids=str)
def test_parameters_that_some_ranks_use_train_as_unsharded(tmp_path, more):
    """Some parameter is unused from the first step on: later it would be known two steps late."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port, more, str(tmp_path)), nprocs=2)
    found = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    assert all(off < 2e-5 for each in found for off in each.values()), found
