"""`copy.deepcopy` of a sharded model: a sentence with what to do in place of FSDP's assertion."""

from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fullshard.base.errors import FullshardError


def refuse_deepcopies(model: nn.Module) -> None:
    """Make copies of the model and of its units raise. Libraries make their reference model or average so."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.__deepcopy__ = _refuse  # type: ignore[assignment]


def _refuse(memo: Any) -> NoReturn:
    raise FullshardError(
        "a sharded model cannot be copied by deepcopy; build and shard a second one, on_torch.shard(second, plan).model, "
        "or keep copies of the weights from state.values()"
    )
