"""The private parts of JAX that the engine uses, each detected by name."""

from pathlib import Path
from typing import Any

LIBRARIES = ("site-packages", str(Path(__file__).parents[1]))  # whose lines are not the user's


def coordination_client() -> Any:
    """The client of `jax.distributed`'s key-value store, or None in a process that joined no others."""
    from jax._src import distributed

    return getattr(distributed.global_state, "client", None)


def devices_are_taken() -> bool:
    """Whether this process has begun to use its devices: a GPU's memory is then largely taken."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def scope_and_line(equation: Any) -> tuple[str, str]:
    """The scope of an operation of a traced program, and the line of the user's code that it is from, or nothing."""
    source = getattr(equation, "source_info", None)
    frames = getattr(getattr(source, "traceback", None), "frames", ())
    own = (f for f in frames if not any(part in f.file_name for part in LIBRARIES))
    line = next((f"{f.file_name.rpartition('/')[2]}:{f.line_num}" for f in own), "")
    return str(getattr(source, "name_stack", "")), line


def scanned_arguments(params: Any) -> tuple[int, int]:
    """How many constants a scan has, which are its first arguments, and how many values it carries, which follow them."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()  # since JAX 0.11
    return len(constants), len(carried)
