"""The torch engine: carries a plan out on PyTorch FSDP2."""

from fullshard.on_torch.collective_log import record
from fullshard.on_torch.describe import describe
from fullshard.on_torch.generate import generate
from fullshard.on_torch.initialize import initialize
from fullshard.on_torch.lora import add_adapters
from fullshard.on_torch.loss import summed_loss
from fullshard.on_torch.loss_chunks import chunked_cross_entropy, chunked_loss
from fullshard.on_torch.measuring.measure import measure
from fullshard.on_torch.model_loading import load_model
from fullshard.on_torch.ranks import data_rank, finish, is_first, start
from fullshard.on_torch.saving.save import Checkpointer
from fullshard.on_torch.shard import shard
from fullshard.on_torch.sharded_optimizer import global_norm
from fullshard.on_torch.state import State, memory
from fullshard.on_torch.step import OutOfMemory, StepResult, evaluate, train_step

__all__ = [
    "Checkpointer",
    "OutOfMemory",
    "State",
    "StepResult",
    "add_adapters",
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
    "load_model",
    "measure",
    "memory",
    "record",
    "shard",
    "start",
    "summed_loss",
    "train_step",
]
