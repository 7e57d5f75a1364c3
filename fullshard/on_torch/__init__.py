"""The torch engine: carries a plan out on PyTorch FSDP2."""

from fullshard.on_torch.agree import all_or_none, first_decides
from fullshard.on_torch.collective_log import record
from fullshard.on_torch.describe import describe
from fullshard.on_torch.generate import generate
from fullshard.on_torch.hang_report import HangReporter
from fullshard.on_torch.initialize import initialize
from fullshard.on_torch.lora import add_adapters
from fullshard.on_torch.loss import summed_loss
from fullshard.on_torch.loss_chunks import chunked_cross_entropy, chunked_loss
from fullshard.on_torch.measuring.device_presets import local_cluster
from fullshard.on_torch.measuring.host_pace import host_share
from fullshard.on_torch.measuring.measure import disk_rates_together, measure
from fullshard.on_torch.model_loading import limits, load_model, takes_positions
from fullshard.on_torch.ranks import data_rank, finish, is_first, local_devices, ranks_here, start
from fullshard.on_torch.refuse import refuse
from fullshard.on_torch.saving.restore import load_checkpoint
from fullshard.on_torch.saving.save import Checkpointer, Saving
from fullshard.on_torch.saving.state_tensors import weights_of
from fullshard.on_torch.shard import shard
from fullshard.on_torch.sharded_optimizer import global_norm, refuse_optimizer
from fullshard.on_torch.state import State, memory
from fullshard.on_torch.step import OutOfMemory, StepResult, evaluate, train_step
from fullshard.on_torch.tracing.flops import flops_per_token, peak_flops
from fullshard.on_torch.weights import Weights

__all__ = [
    "Checkpointer",
    "HangReporter",
    "OutOfMemory",
    "Saving",
    "State",
    "StepResult",
    "Weights",
    "add_adapters",
    "all_or_none",
    "chunked_cross_entropy",
    "chunked_loss",
    "data_rank",
    "describe",
    "disk_rates_together",
    "evaluate",
    "finish",
    "first_decides",
    "flops_per_token",
    "generate",
    "global_norm",
    "host_share",
    "initialize",
    "is_first",
    "limits",
    "load_checkpoint",
    "load_model",
    "local_cluster",
    "local_devices",
    "measure",
    "memory",
    "peak_flops",
    "ranks_here",
    "record",
    "refuse",
    "refuse_optimizer",
    "shard",
    "start",
    "summed_loss",
    "takes_positions",
    "train_step",
    "weights_of",
]
