"""Build a model with its own code: on the meta device, and once for real to learn its initial values.

A model's `__init__` may set values that no rule of a module gives: a scaled initialisation, a computed buffer, a tensor
that is a plain attribute. Building it for real is the only way to keep them.
"""

import io
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.base.errors import FullshardError, first_line
from fullshard.base.text import bytes_text
from fullshard.storage.memory_limits import limits

KEPT = "_fullshard_factory"  # an attribute of a model, which copies of the model have too
RULE = "_init_weights"  # the convention of Hugging Face and nanoGPT: initialises one module


@dataclass(frozen=True)
class Factory:
    """A callable that returns a module. `shard(model, plan, init=Factory(make))` gives `model` the values that `make()` gives
    after `torch.manual_seed(seed)`. `name`: how messages call it."""

    build: Callable[[], object]
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or getattr(self.build, "__qualname__", "the factory")

    def on_meta(self) -> nn.Module:
        """The model without memory for its tensors. One that cannot be built on meta is built for real and emptied."""
        try:
            with torch.device("meta"):
                model = self.call()
        except FullshardError:
            raise
        except Exception:  # for example, __init__ reads the value of a tensor
            model, _ = self.for_real(0)
        empty(model)
        return model

    def for_real(self, seed: int) -> tuple[nn.Module, bool]:
        """The model with its values, on the CPU; and whether it has an `_init_weights` that building it never called. Floats
        that nobody set are NaN."""
        try:
            with _seeded(seed), _unset_is_nan(), _calls_of(RULE) as calls, torch.device("cpu"):
                model = self.call()
        except FullshardError:
            raise
        except Exception as error:
            raise FullshardError(f"{self.title} could not be built: {type(error).__name__}: {first_line(error)}") from error
        return model, not calls and any(callable(getattr(m, RULE, None)) for m in model.modules())

    def call(self) -> nn.Module:
        """The module. What the callable prints goes to stderr, on the first rank only."""
        with redirect_stdout(sys.stderr if os.environ.get("RANK", "0") == "0" else io.StringIO()):
            model = self.build()
        if not isinstance(model, nn.Module):
            raise FullshardError(f"{self.title} returned {type(model).__name__}, not a torch.nn.Module")
        return model

    def refuse_too_large(self, model: nn.Module) -> None:
        """Raise if host memory has no room for the model that is on meta."""
        tensors = {id(t): t for _, _, t in tensors_of(model)}
        needed = sum(t.numel() * t.element_size() for t in tensors.values())
        tightest = min(limits(), key=lambda limit: limit.free)
        if needed > tightest.free:
            raise FullshardError(
                f"{self.title} takes {bytes_text(needed)} of host memory to build, but {bytes_text(max(0, tightest.free))} of "
                f"the {bytes_text(tightest.total)} of {tightest.whose} are free; write model.init = 'modules' and give each "
                "module a reset_parameters(), or the model an _init_weights(module): they initialise it shard by shard"
            )


def tensors_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every tensor of a model with its module and name: parameters, buffers and plain attributes. Tied ones come several
    times."""
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            if isinstance(tensor, Tensor):
                yield module, name, tensor


def empty(model: nn.Module) -> None:
    """Put every tensor of a model on meta. Tied parameters stay tied."""
    made: dict[int, Tensor] = {}
    for module, name, tensor in list(tensors_of(model)):
        if not tensor.is_meta:
            made.setdefault(id(tensor), _meta_like(tensor))
            replace_tensor(module, name, made[id(tensor)])


def replace_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a module another tensor under the name of one that it has."""
    place: dict[str, Any] = next(d for d in (module._parameters, module._buffers, vars(module)) if name in d)
    place[name] = tensor


def _meta_like(tensor: Tensor) -> Tensor:
    bare = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(bare, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


# -- the surroundings of a build -------------------------------------------------------------------------------


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, the random numbers of torch, Python and NumPy follow from `seed`. Afterwards they go on as before."""
    numpy: Any = sys.modules.get("numpy")
    own, others = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(own)
            if numpy:
                numpy.random.set_state(others)


def keep_factory(model: nn.Module, factory: Factory) -> None:
    """Let `shard` give the model the factory's values."""
    vars(model)[KEPT] = factory


def kept_factory(model: nn.Module) -> Factory | None:
    return vars(model).get(KEPT)


@contextmanager
def _unset_is_nan() -> Iterator[None]:
    """Inside, new memory is filled with NaN."""
    mode, fill = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextmanager
def _calls_of(name: str) -> Iterator[list[str]]:
    """Inside, the list gets an entry for each call of a Python function of this name."""
    found: list[str] = []
    before = sys.getprofile()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name == name:
            found.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
