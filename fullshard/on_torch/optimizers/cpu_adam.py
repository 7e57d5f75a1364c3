"""An Adam update by the CPU in one pass over memory: it reads the gradient in its own dtype and writes the parameter in the
compute dtype. A packed master is unpacked and packed again on the way.

The host's memory bandwidth limits these updates. Torch's kernels would pass over it three times: to widen the gradient, to
update, to narrow the parameter. `cpu_adam.c` gives the same bits in one pass. It is compiled once for a machine; without a C
compiler torch's kernels are used.
"""

import ctypes
import hashlib
import math
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fullshard.base.errors import first_line
from fullshard.on_torch.optimizers.adam_update import Rule, apply_rule
from fullshard.on_torch.optimizers.packed_masters import pack, unpack

KINDS = {torch.float32: "from_fp32", torch.bfloat16: "from_bf16"}  # of gradients
SOURCE = Path(__file__).with_name("cpu_adam.c")
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC"]
CHUNK = 1 << 20  # elements of a call to torch: milliseconds
SECONDS = 60  # limit for the compiler
FUSES = {b"fma", b"asimd"}  # CPU flags of fused multiply-add, which torch's kernels use


class Numbers(ctypes.Structure):
    """`struct numbers` in cpu_adam.c."""

    _fields_ = [
        ("factor", ctypes.c_float * 2),
        *((name, ctypes.c_float) for name in ("kept", "decay", "lerp", "near_gradient", "beta2", "rest2", "root", "eps", "step")),
    ]


class OnePass:
    """The update of one piece. `rounded`: memory for the new parameters in the compute dtype, if they are wanted; if the
    master is packed (int16), it holds the old ones. `threads`: of each compiled call. Torch's kernels get one thread, as
    several calls run at a time."""

    def __init__(
        self,
        rule: Rule,
        state: Sequence[Tensor],
        gradient: Tensor,
        rounded: Tensor | None,
        factors: Sequence[float] = (),
        threads: int = 1,
    ):
        self.threads = threads
        self.rule, self.state, self.gradient, self.rounded, self.factors = rule, state, gradient, rounded, factors
        self.compiled = _fitting(rule, state, gradient, rounded, factors)
        self.addresses = [0 if t is None else t.data_ptr() for t in (state[0], gradient, *state[1:], rounded)]
        self.sizes = [0 if t is None else t.itemsize for t in (state[0], gradient, *state[1:], rounded)]

    def calls(self, runs: Iterable[tuple[int, int, int, dict[str, Any]]]) -> list[tuple[int, int, int, dict[str, Any]]]:
        """The arguments of each `run` for these spans, each with its `step` and `group`."""
        size = CHUNK if self.compiled is None else 1 << 62
        return [(a, min(a + size, stop), step, group) for start, stop, step, group in runs for a in range(start, stop, size)]

    def run(self, start: int, stop: int, step: int, group: dict[str, Any]) -> None:
        """Update elements `start` to `stop`. `step`, `group`: see `apply_rule`."""
        if self.compiled is None:
            return self._by_torch(start, stop, step, group)
        at = [address + start * size for address, size in zip(self.addresses, self.sizes, strict=True)]
        numbers = _numbers(self.rule, self.factors, step, group)
        self.compiled(*at, stop - start, ctypes.byref(numbers), self.threads)

    def _by_torch(self, start: int, stop: int, step: int, group: dict[str, Any]) -> None:
        low, *moments = [t[start:stop] for t in self.state]
        rounded = None if self.rounded is None else self.rounded[start:stop]
        master = low
        if low.dtype is torch.int16:
            assert rounded is not None
            master = torch.empty_like(moments[0])
            unpack(rounded, low, moments[1], master)
        own = self.gradient[start:stop].to(master.dtype)
        for factor in self.factors:
            own.mul_(factor)
        apply_rule(self.rule, master, own, moments, step, group)
        if rounded is not None:
            rounded.copy_(master)
            if master is not low:
                pack(master, rounded, low, moments[1])


def _numbers(rule: Rule, factors: Sequence[float], step: int, group: dict[str, Any]) -> Numbers:
    """The kernel's constants, as torch computes them: in double precision, then rounded to single."""
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    decoupled = rule.kind == "adamw"
    lerp = ctypes.c_float(1 - beta1).value
    return Numbers(
        factor=(*factors, 1.0, 1.0)[:2],
        kept=1 - lr * decay if decoupled else 1.0,
        decay=0.0 if decoupled else decay,
        lerp=lerp if lerp < 0.5 else lerp - 1,
        near_gradient=float(lerp >= 0.5),
        beta2=beta2,
        rest2=1 - beta2,
        root=math.sqrt(1 - beta2**step),
        eps=group["eps"],
        step=-(lr / (1 - beta1**step)),
    )


def _fitting(
    rule: Rule, state: Sequence[Tensor], gradient: Tensor, rounded: Tensor | None, factors: Sequence[float]
) -> Callable[..., None] | None:
    """The compiled function for these dtypes, or None."""
    packed = state[0].dtype is torch.int16
    dtypes = [t.dtype for t in state[packed:]], gradient.dtype, rounded.dtype if rounded is not None else None
    if unfit(rule, *dtypes) or len(factors) > 2 or library() is None:
        return None
    return getattr(library(), KINDS[gradient.dtype] + ("_packed" if packed else "" if rounded is None else "_rounded"))


def unfit(rule: Rule, state: Iterable[torch.dtype], gradient: torch.dtype, rounded: torch.dtype | None) -> str:
    """The kind or dtype that cpu_adam.c does not support, or an empty string."""
    if rule.kind not in ("adamw", "adam"):
        return rule.kind
    odd = [d for d in state if d is not torch.float32] + [d for d in (gradient,) if d not in KINDS]
    odd += [d for d in (rounded,) if d not in (None, torch.bfloat16)]
    return str(odd[0])[6:] if odd else ""


@dataclass(frozen=True)
class Built:
    """cpu_adam.c as a library, or the reason that there is none."""

    library: ctypes.CDLL | None
    why: str = ""


@cache
def built() -> Built:
    return build()


def library() -> ctypes.CDLL | None:
    """cpu_adam.c, compiled for this machine, or None."""
    return built().library


def build() -> Built:
    """Compile cpu_adam.c for this machine into the user's cache, unless it is there."""
    try:
        source, machine = SOURCE.read_bytes(), _machine()
        if not FUSES & set(machine.split()):
            return Built(None, "this CPU does not multiply and add with one rounding")
        key = hashlib.sha256(source + machine + " ".join(FLAGS).encode()).hexdigest()[:24]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fullshard"
        found = folder / f"update-{key}.so"
        if not found.exists():
            _compile(found)
        return Built(_declared(ctypes.CDLL(str(found))))
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return Built(None, f"{_compiler()} cannot compile cpu_adam.c: {said[0]}")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        missing = isinstance(error, FileNotFoundError) and error.filename == _compiler()
        return Built(None, f"there is no C compiler ({_compiler()})" if missing else first_line(error))


def _compiler() -> str:
    return os.environ.get("CC") or "cc"


def _machine() -> bytes:
    """This CPU's instruction flags: machines that share a home directory may differ in them."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _compile(target: Path) -> None:
    """Compile in a folder of its own and move the result: several ranks may do it at the same time."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        call = [_compiler(), *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
        subprocess.run(call, check=True, capture_output=True, timeout=SECONDS)
        made.replace(target)


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    for name in ("from_fp32", "from_bf16"):
        for end in ("", "_rounded", "_packed"):
            function = getattr(found, name + end)
            function.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_ssize_t, ctypes.POINTER(Numbers), ctypes.c_int]
            function.restype = None
    return found
