"""The JAX engine behind `fullshard.engine`: a module for each of its parts, and nothing else."""

from fullshard.engine.engine import Engine
from fullshard.on_jax.engine import machine, model, ranks, saver, trainer
from fullshard.on_jax.model.describe import Factory
from fullshard.on_jax.parallelize.state import JaxState

ENGINE: Engine[Factory, JaxState] = Engine("jax", ranks, model, trainer, saver, machine)
