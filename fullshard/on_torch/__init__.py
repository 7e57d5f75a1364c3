"""The torch engine: carries a plan out on PyTorch FSDP2."""

from fullshard.on_torch.chunked import chunked_cross_entropy, chunked_loss
from fullshard.on_torch.collectives import record
from fullshard.on_torch.describe import describe
from fullshard.on_torch.generate import generate
from fullshard.on_torch.initialize import initialize
from fullshard.on_torch.load import load_model
from fullshard.on_torch.loss import summed_loss
from fullshard.on_torch.optim import global_norm
from fullshard.on_torch.ranks import data_rank, start
from fullshard.on_torch.shard import shard
from fullshard.on_torch.state import State
from fullshard.on_torch.step import StepResult, evaluate, train_step

__all__ = [
    "State",
    "StepResult",
    "chunked_cross_entropy",
    "chunked_loss",
    "data_rank",
    "describe",
    "evaluate",
    "generate",
    "global_norm",
    "initialize",
    "load_model",
    "record",
    "shard",
    "start",
    "summed_loss",
    "train_step",
]
