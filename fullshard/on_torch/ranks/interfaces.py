"""The network interface by which ranks on several machines reach each other.

gloo takes the one that the machine's own name means. On Debian that is 127.0.1.1, which no other machine reaches, and a name may
mean nothing at all. The route to the first machine tells more. Knows nothing of torch.
"""

import fcntl
import os
import socket
import struct

from fullshard.ranks.rank_protocols import Messages

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_OUTSIDE = "address of a machine"


def offer_address(messages: Messages, first: str) -> str | None:
    """This machine's address on the way to the first one, offered to those that only know a loopback address of themselves."""
    own = own_address(first)
    if own is not None and not own.startswith("127."):
        messages.put(_OUTSIDE, own)
    return own


def choose_interface(messages: Messages, own: str | None) -> None:
    """Tell gloo and NCCL which interface leads to the other machines, unless the user has. `own`: what `offer_address` returned,
    on all ranks by now. Nothing for ranks of one machine that meet by a loopback address."""
    if own is not None and own.startswith("127."):
        other = messages.get(_OUTSIDE)
        own = own_address(other) if other else None
    name = interface_of(own) if own else None
    if name:
        os.environ.setdefault(GLOO, name)
        os.environ.setdefault(NCCL, f"={name}")  # the whole name: NCCL would take it for the beginning of several


def own_address(other: str) -> str | None:
    """The IPv4 address that this machine has on the way to another; None if there is no way. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of this machine's interface with an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        return next((name for _, name in socket.if_nameindex() if _address(asked, name) == address), None)


def _address(asked: socket.socket, name: str) -> str | None:
    try:
        found = fcntl.ioctl(asked.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(found[20:24])
