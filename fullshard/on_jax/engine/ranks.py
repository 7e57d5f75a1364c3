"""The processes of a run on JAX, as `fullshard.engine.ranks.Ranks`."""

from importlib.metadata import version

from fullshard.on_jax.ranks.jax_devices import all_devices
from fullshard.on_jax.ranks.processes import CoordinatorMessages as messages  # noqa: N813 - a call opens a connection
from fullshard.on_jax.ranks.processes import count, data_share, finish, is_first, lost_a_peer, rank_and_world, start
from fullshard.on_jax.ranks.processes import main_agreement as agreement
from fullshard.ranks.hang_reports import innermost_line, main_thread_frame, stack_of
from fullshard.ranks.rank_protocols import Where

__all__ = [
    "agreement",
    "all_devices",
    "data_share",
    "finish",
    "have_met",
    "is_first",
    "keep_alive",
    "lost_a_peer",
    "messages",
    "position",
    "rank_and_world",
    "start",
    "versions",
]


def have_met() -> bool:
    return count() > 1


def position() -> Where:
    """Where this process's main thread is. Which collective it waits in, a compiled program does not tell."""
    stack = stack_of(main_thread_frame())
    waits = bool(stack) and "jax" in stack[-1].filename
    return {"waits": waits, "collective": None, "unit": None, "count": 0, "line": innermost_line(stack, "site-packages")}


def keep_alive(seconds: float | None) -> None:
    """No launcher of these processes has a timer."""


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "flax", "optax")}
