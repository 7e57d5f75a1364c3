"""The moment before an exception in a thread of C++ aborts this process, such as one of gloo's threads.

Python's handlers of signals run in the main thread, which waits for the thread that aborts. C++ calls a function of its own
before, in the thread of the exception. Knows nothing of ranks.
"""

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path

LIBRARY, SET = "libstdc++.so.6", "_ZSt13set_terminatePFvvE"  # std::set_terminate, of the library that torch has loaded
FUNCTION = ctypes.CFUNCTYPE(None)
_installed: dict[Callable[[], None], object] = {}


def before_abort(call: Callable[[], None]) -> None:
    """Call this before an exception in C++ aborts the process. Installed once. Nothing where C++ has another library."""
    try:
        setter = getattr(ctypes.CDLL(LIBRARY), SET)
    except (OSError, AttributeError):
        return
    if call in _installed:
        return
    setter.restype = ctypes.c_void_p
    setter.argtypes = [FUNCTION]
    owner = os.getpid()

    def terminate() -> None:
        if os.getpid() == owner:  # not in a worker that was forked
            with contextlib.suppress(Exception):
                call()
        plain()

    _installed[call] = handler = FUNCTION(terminate)
    plain = FUNCTION(setter(handler))


def shut_connections(kept: Collection[int | None]) -> None:
    """Shut all TCP connections of this process but those from or to these ports: who waits at their other ends hears of it."""
    for name in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name.name))) as connection:
            internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if internet and not {connection.getsockname()[1], connection.getpeername()[1]} & set(kept):
                connection.shutdown(socket.SHUT_RDWR)
