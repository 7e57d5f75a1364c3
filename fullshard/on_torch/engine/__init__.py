"""The torch engine behind `fullshard.engine`: a module for each of its parts, and nothing else."""

from torch import nn

from fullshard.engine.engine import Engine
from fullshard.on_torch.engine import machine, model, ranks, saver, trainer
from fullshard.on_torch.parallelize.state import State

ENGINE: Engine[nn.Module, State] = Engine("torch", ranks, model, trainer, saver, machine)
