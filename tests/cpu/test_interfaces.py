"""Which network interface ranks take. Two machines with names that mislead are in test_two_machines.py."""

import os
import socket

import pytest
import torch.distributed as dist

from fullshard.on_torch.ranks.interfaces import GLOO, NCCL, choose_interface, interface_of, offer_address
from fullshard.on_torch.ranks.store_messages import StoreClient


@pytest.fixture
def messages(monkeypatch):
    for name in (GLOO, NCCL):
        monkeypatch.delenv(name, raising=False)
    yield StoreClient(dist.HashStore())
    for name in (GLOO, NCCL):
        os.environ.pop(name, None)


def chosen() -> list[str | None]:
    return [os.environ.get(name) for name in (GLOO, NCCL)]


def test_ranks_of_one_machine_choose_nothing(messages):
    choose_interface(messages, offer_address(messages, "127.0.0.1"))
    assert chosen() == [None, None]


def test_a_machine_that_knows_only_its_loopback_takes_the_way_to_one_that_does_not(messages):
    outside = other_address()
    assert offer_address(messages, outside) == outside  # as another machine does
    choose_interface(messages, offer_address(messages, "127.0.1.1"))
    assert chosen() == [interface_of(outside), f"={interface_of(outside)}"]
    assert interface_of(outside) != "lo"


def test_what_the_user_has_set_stays(messages, monkeypatch):
    monkeypatch.setenv(GLOO, "ib0")
    choose_interface(messages, offer_address(messages, other_address()))
    assert chosen()[0] == "ib0"


def other_address() -> str:
    """An address of this machine that is no loopback address, as the kernel tells."""
    lines = os.popen("ip -o -4 addr show scope global").read().splitlines()
    if not lines:
        pytest.skip("this machine has a loopback interface alone")
    return lines[0].split()[3].partition("/")[0]


def test_a_name_that_means_nothing_is_no_error(messages):
    with pytest.raises(OSError):  # noqa: PT011  whatever the resolver says
        socket.gethostbyname("no-such-host.invalid")
    choose_interface(messages, offer_address(messages, "no-such-host.invalid"))
    assert chosen() == [None, None]
