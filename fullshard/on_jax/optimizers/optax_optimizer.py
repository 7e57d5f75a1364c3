"""fullshard's optimizers as Optax transformations. The step multiplies their result by the learning rate."""

from collections.abc import Mapping
from typing import Any

import optax

from fullshard.base.errors import FullshardError, a_kind
from fullshard.on_jax.model.scanned_layers import is_stacked
from fullshard.plan.optimizer import SGD, Adam, AdamW, Optimizer, TorchOptimizer


def make_transformation(optimizer: Optimizer) -> optax.GradientTransformation:
    """The direction in which an optimizer moves parameters, before the learning rate."""
    if not isinstance(optimizer, Adam | SGD):
        what = f"the optimizer {optimizer.name}" if isinstance(optimizer, TorchOptimizer) else a_kind(optimizer)
        raise FullshardError(f"{what} is of torch; JAX has adamw, adam and sgd")
    decay = optax.add_decayed_weights(optimizer.weight_decay, mask=None if optimizer.decay_all else _matrices)
    if isinstance(optimizer, SGD):
        momentum = optax.trace(optimizer.momentum, optimizer.nesterov) if optimizer.momentum else optax.identity()
        return optax.chain(decay, momentum)
    adam = optax.scale_by_adam(*optimizer.betas, eps=optimizer.eps)
    return optax.chain(adam, decay) if isinstance(optimizer, AdamW) else optax.chain(decay, adam)


def _matrices(params: Mapping[str, Any]) -> dict[str, bool]:
    """Norms and biases have one dim, and no weight decay."""
    return {name: p.ndim - is_stacked(name) > 1 for name, p in params.items()}
