"""The torch engine: carries a plan out on PyTorch FSDP2."""

from fullshard.on_torch.chunked import chunked_cross_entropy, chunked_loss
from fullshard.on_torch.collectives import record
from fullshard.on_torch.describe import describe
from fullshard.on_torch.generate import generate
from fullshard.on_torch.initialize import initialize
from fullshard.on_torch.load import limits, load_model
from fullshard.on_torch.loss import summed_loss
from fullshard.on_torch.measure import measure
from fullshard.on_torch.optim import global_norm
from fullshard.on_torch.ranks import data_rank, finish, is_first, local_devices, start
from fullshard.on_torch.refuse import refuse
from fullshard.on_torch.shard import shard
from fullshard.on_torch.state import State, memory
from fullshard.on_torch.step import StepResult, any_rank, evaluate, train_step

__all__ = [
    "State",
    "StepResult",
    "any_rank",
    "chunked_cross_entropy",
    "chunked_loss",
    "data_rank",
    "describe",
    "evaluate",
    "finish",
    "generate",
    "global_norm",
    "initialize",
    "is_first",
    "limits",
    "load_model",
    "local_devices",
    "measure",
    "memory",
    "record",
    "refuse",
    "shard",
    "start",
    "summed_loss",
    "train_step",
]
