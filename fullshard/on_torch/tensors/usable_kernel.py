"""Whether a Triton kernel can be used on this machine, and why not."""

from collections.abc import Callable
from subprocess import SubprocessError
from types import ModuleType

from fullshard.base.errors import FullshardError, first_line

Found = tuple[ModuleType | None, str]  # the module with the kernel, or None and the reason


def usable_kernel(what: str, find: Callable[[], ModuleType | None]) -> Found:
    """What `find` returns, or None and the reason: there is no Triton, it cannot compile for this device, or `find` returned
    None, because results differ from torch's. Any other error is raised. `what`: what the kernel computes."""
    try:
        found = find()
        return (found, "") if found is not None else (None, "Triton's differs from torch's on this GPU")
    except ImportError as error:
        return None, f"Triton cannot be imported ({first_line(error)})"
    except Exception as error:
        if isinstance(error, OSError | SubprocessError) or (isinstance(error, RuntimeError) and "C compiler" in str(error)):
            return None, f"Triton finds no compiler that works ({first_line(error)})"
        raise FullshardError(
            f"the Triton kernel of {what} fails on this GPU ({type(error).__name__}: {first_line(error)}); report it, and go on "
            "without Triton: pip uninstall triton"
        ) from error
