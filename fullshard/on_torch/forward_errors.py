"""What is wrong with a model whose forward fails because it is sharded, and what to write instead."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import Tensor, nn

from fullshard.errors import FullshardError
from fullshard.on_torch.kernels.plan_kernels import NO_KERNEL
from fullshard.on_torch.tracing.trace_errors import LIBRARIES, model_line
from fullshard.plan import Plan

MIXED = "got mixed torch.Tensor and DTensor"  # what torch says of an operation on sharded and plain tensors


@contextmanager
def explained(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Inside, an operation on a sharded parameter raises a sentence that names its unit; so does an attention that the plan's
    backend cannot compute."""
    try:
        yield
    except RuntimeError as error:
        if NO_KERNEL in str(error) and plan.kernels.attention != "auto":
            raise FullshardError(
                f"kernels.attention = {plan.kernels.attention!r} cannot compute this model's attention, for its mask, dtype or "
                "width of heads; leave it out"
            ) from error
        if MIXED not in str(error):
            raise
        names = {id(p): name for name, p in model.named_parameters()}
        found = [names[id(p)] for p in _named_in_line(error) if id(p) in names]
        unit = plan.unit_of(found[0]) if found else None
        what, which = (found[0], repr(unit.name)) if unit else ("a parameter of another module", "its unit")
        raise FullshardError(
            f"{model_line(error) or 'the loss'} computes with {what} outside the forward of its module, when it is sharded; "
            f"keep it gathered until backward: plan.change({which}, reshard=False), or strategy zero2"
        ) from error


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
