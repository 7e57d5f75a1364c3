"""What is wrong with a model whose forward fails because it is sharded, and what to write instead."""

import functools
import os
import re
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn

from fullshard.base.errors import FullshardError, first_line
from fullshard.base.text import first_of
from fullshard.on_torch.model.tied_parameters import parameter_names
from fullshard.on_torch.parallelize.attention_backend import NO_KERNEL
from fullshard.on_torch.tensors.dtypes import PLAN_DTYPES
from fullshard.on_torch.tensors.trace_errors import LIBRARIES, model_line
from fullshard.plan.plan import Plan

DTENSOR, FSDP = os.path.join("torch", "distributed", "tensor"), os.path.join("torch", "distributed", "fsdp")
MIXED = "got mixed torch.Tensor and DTensor"  # what torch says of an operation on sharded and plain tensors
IN_PLACE = "RegisterPostBackward"  # FSDP's function on what a unit is given, of which torch speaks if that is changed in place


@contextmanager
def explained(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Inside, an operation on a sharded parameter raises a sentence that names its unit; so does an attention that the plan's
    backend cannot compute, a buffer of another dtype, and an input of a unit that is changed in place."""
    try:
        yield
    except RuntimeError as error:
        if (sentence := _sentence(error, model, plan)) is None:
            raise
        raise FullshardError(sentence) from error


def early_notes(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """What a user should know of parameters that the root gathers because no module of their own does so in time."""
    units = [path for unit in plan.units for path in unit.modules if path]
    around = {".".join(path.split(".")[:i]) for path in units for i in range(path.count(".") + 1)}
    found = [
        names[0]
        for names in parameter_names(model).values()
        if (unit := plan.unit_of(names[0])) and unit.modules == ("",) and not {n.rpartition(".")[0] for n in names} & around
    ]
    if not found or not units:
        return ()
    return (f"{first_of(found)}: used outside the forward of its module, so gathered with the root for the whole forward",)


def explain_forward(model: nn.Module, plan: Plan) -> None:
    """Let the model's forward raise these sentences, in whatever loop it is called."""
    own = vars(model).get("forward")

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:  # dynamo takes this, but no context manager of Python's own
            return own(*args, **kwargs) if own else type(self).forward(self, *args, **kwargs)
        except RuntimeError as error:
            if (sentence := _sentence(error, self, plan)) is None:
                if not _is_of_shards(error):
                    raise
                sentence = _outside(error, self, plan)
            raise FullshardError(sentence) from error

    model.forward = types.MethodType(forward, model)


def _sentence(error: RuntimeError, model: nn.Module, plan: Plan) -> str | None:
    """What to write instead; None for an error of another cause."""
    if NO_KERNEL in str(error) and plan.kernels.attention != "auto":
        return (
            f"kernels.attention = {plan.kernels.attention!r} cannot compute this model's attention, for its mask, dtype or "
            "width of heads; leave it out"
        )
    if IN_PLACE in str(error):
        return (
            f"{model_line(error) or 'the model'} changes in place what a unit was given, which FSDP does not allow; write it out "
            "of place (x = x + y for x += y), or group so that its module is no unit: describe(model, classes=[…])"
        )
    if MIXED in str(error):
        return _outside(error, model, plan)
    return _other_dtype(error, model, plan) if "dtype" in str(error) else None


def _is_of_shards(error: RuntimeError) -> bool:
    """True if the model's own code gave a sharded tensor to an operation that DTensor does not have."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(DTENSOR in file for file in files) and not any(FSDP in file for file in files)


def _outside(error: RuntimeError, model: nn.Module, plan: Plan) -> str:
    if any(f.f_code.co_name == "backward" and not _is_library(f) for f, _ in traceback.walk_tb(error.__traceback__)):
        return (
            f"{model_line(error) or 'the model'} is computed in a backward of the model's own, in which FSDP gathers no "
            "parameters; such a model cannot be sharded: leave backward to autograd, and recompute blocks by remat='full'"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    found = [names[id(p)] for p in _named_in_line(error) if id(p) in names]
    unit = plan.unit_of(found[0]) if found else None
    what, which = (found[0], repr(unit.name)) if unit else ("a parameter of another module", "its unit")
    return (
        f"{model_line(error) or 'the loss'} computes with {what} outside the forward of its module, when it is sharded; let a "
        "batch show it to the plan: on_torch.describe(model, example=batch, loss=loss, costs=False); or, where its unit ran "
        f"before, keep that gathered until backward: plan.change({which}, reshard=False), or strategy zero2"
    )


def _other_dtype(error: RuntimeError, model: nn.Module, plan: Plan) -> str | None:
    """A sentence if a buffer has another dtype than the plan computes in."""
    compute = plan.precision.compute
    others = [n for n, b in model.named_buffers() if b.is_floating_point() and b.dtype is not PLAN_DTYPES[compute]]
    if compute == plan.precision.master or plan.precision.buffers is not None or not others:
        return None
    return (
        f"{model_line(error) or 'the loss'} computes with two dtypes ({first_line(error)}): the plan computes in {compute}, and "
        f"buffers such as {others[0]} keep their own; cast them: Precision(buffers={compute!r}), or precision.buffers in a recipe"
    )


def _named_in_line(error: BaseException) -> list[Tensor]:
    """The tensors that the innermost line of the model names as `self.….weight`."""
    frames = [(f, line) for f, line in traceback.walk_tb(error.__traceback__) if not _is_library(f)]
    if not frames:
        return []
    frame, line = frames[-1]
    text = traceback.StackSummary.extract([(frame, line)])[0].line or ""
    found = []
    for path in re.findall(r"\bself\.([\w.]+)", text):
        value = frame.f_locals.get("self")
        for part in path.split("."):
            value = getattr(value, part, None)
            if isinstance(value, Tensor):
                found.append(value)
    return found


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*LIBRARIES, "<"))
