"""Serves the page on this machine's own address until it is interrupted."""

import errno
import ipaddress
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from fullshard.base.errors import FullshardError
from fullshard.observe.page.app import make_app
from fullshard.observe.page.guard import Guard
from fullshard.observe.page.plan_answer import Describe
from fullshard.observe.page.run_view import RunView


@dataclass(frozen=True)
class PageAddress:
    """Where the page is. `url` has the token; who does not have it is refused."""

    socket: socket.socket
    host: str
    port: int
    token: str

    @property
    def origin(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.origin}/?token={self.token}"

    @property
    def hosts(self) -> frozenset[str]:
        """The Host headers that are answered."""
        return frozenset({self.origin, f"localhost:{self.port}"})


def listen(host: str = "127.0.0.1", port: int = 0) -> PageAddress:
    """Take an address of this machine. `port` 0: any that is free."""
    address = _loopback(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        why = "is in use by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise FullshardError(f"port {port} of {address} {why}; give another --port, or leave it out") from None
    return PageAddress(listener, address, listener.getsockname()[1], secrets.token_urlsafe(24))


def _loopback(host: str) -> str:
    """The address of a host that only this machine can reach."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise FullshardError(
            f"--host {host} can be reached from other machines, and the page is for this one; leave it out, "
            "and forward the port from elsewhere: ssh -L 8080:127.0.0.1:PORT"
        )
    return host


def open_runs(directories: list[Path]) -> list[RunView]:
    """The runs to show. Raises for a directory that holds none."""
    return [RunView(directory) for directory in directories]


def serve(address: PageAddress, runs: list[RunView], describe: Describe, first: dict[str, str]) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    guarded = Guard(make_app(runs, describe, first), address.token, address.hosts, address.port)
    settings = {"log_level": "warning", "access_log": False, "server_header": False, "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(guarded, lifespan="off", ws="none", **settings)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    try:
        server.run(sockets=[address.socket])
    except KeyboardInterrupt:  # uvicorn ends in order, and raises the signal again
        pass
    finally:
        address.socket.close()
