"""The torch engine: carries a plan out on PyTorch FSDP2."""

from fullshard.on_torch.communication.collective_log import record
from fullshard.on_torch.communication.replaced_collectives import Communication
from fullshard.on_torch.loss.chunked_loss import chunked_cross_entropy, chunked_loss
from fullshard.on_torch.loss.losses import Loss, called_loss, summed_loss
from fullshard.on_torch.loss.objective_losses import class_loss, loss_of, masked_loss, seq2seq_loss
from fullshard.on_torch.measuring.measure import measure
from fullshard.on_torch.model.factory import Factory
from fullshard.on_torch.model.initialize import initialize
from fullshard.on_torch.model.lora import add_adapters
from fullshard.on_torch.model.model_head import objective_of
from fullshard.on_torch.model.model_loading import load_model
from fullshard.on_torch.optimizers.sharded_optimizer import clip_grad_norm_, global_norm
from fullshard.on_torch.parallelize.shard import shard
from fullshard.on_torch.parallelize.state import State, memory
from fullshard.on_torch.ranks.device_meshes import data_rank, finish, is_first, start
from fullshard.on_torch.saving.save import Checkpointer
from fullshard.on_torch.step.dropout_seed import seed_dropout
from fullshard.on_torch.step.generate import generate
from fullshard.on_torch.step.train_step import OutOfMemory, StepResult, evaluate, loss_factor, train_step
from fullshard.on_torch.tracing.describe import describe

__all__ = [
    "Checkpointer",
    "Communication",
    "Factory",
    "Loss",
    "OutOfMemory",
    "State",
    "StepResult",
    "add_adapters",
    "called_loss",
    "chunked_cross_entropy",
    "chunked_loss",
    "class_loss",
    "clip_grad_norm_",
    "data_rank",
    "describe",
    "evaluate",
    "finish",
    "generate",
    "global_norm",
    "initialize",
    "is_first",
    "load_model",
    "loss_factor",
    "loss_of",
    "masked_loss",
    "measure",
    "memory",
    "objective_of",
    "record",
    "seed_dropout",
    "seq2seq_loss",
    "shard",
    "start",
    "summed_loss",
    "train_step",
]
