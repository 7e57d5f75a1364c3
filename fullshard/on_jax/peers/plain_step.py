"""A plain JAX step, as one writes it by hand: all parameters on every device, the rows of a batch spread, one `jax.jit`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from fullshard.base.errors import FullshardError
from fullshard.engine.bench_protocols import PeerRequest
from fullshard.on_jax.loss.losses import summed_loss
from fullshard.on_jax.tensors.dtypes import JAX_DTYPES
from fullshard.plan.optimizer import AdamW


@dataclass
class PlainStep:
    """Parameters, optimizer state and the compiled function."""

    mesh: jax.sharding.Mesh
    values: Any  # (parameters, optimizer state)
    compiled: Any

    def step(self, micro_batches: Sequence[Any]) -> float:
        self.values, loss = self.compiled(self.values, self.placed(micro_batches))
        return float(loss)

    def placed(self, micro_batches: Sequence[Any]) -> Any:
        rows = NamedSharding(self.mesh, PartitionSpec(None, "data"))
        return jax.tree.map(lambda *leaves: jax.device_put(np.stack([np.asarray(x) for x in leaves]), rows), *micro_batches)

    def text(self, micro_batches: Sequence[Any]) -> str:
        """The compiled program."""
        return self.compiled.lower(self.values, self.placed(micro_batches)).compile().as_text()


def plain_step(request: PeerRequest) -> PlainStep:
    """AdamW on the mean cross-entropy of the NNX model, with data parallelism alone."""
    plan, wanted = request.plan, request.optimizer
    if any(unit.remat != "none" for unit in plan.units):
        raise FullshardError("the plain JAX step keeps all activations; write remat=none")
    if not isinstance(wanted, AdamW):
        raise FullshardError("the plain JAX step trains with AdamW; write optim.name=adamw")
    compute = JAX_DTYPES[plan.precision.compute]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: plan.mesh.devices]), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    graph, params, *others = nnx.split(request.model(nnx.Rngs(request.seed)), nnx.Param, ...)
    (rest,) = others
    matrices = lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)
    update = optax.adamw(
        wanted.lr, *wanted.betas, eps=wanted.eps, weight_decay=wanted.weight_decay, mask=None if wanted.decay_all else matrices
    )
    chain = optax.chain(optax.clip_by_global_norm(request.clip), update) if request.clip is not None else update

    def loss(params: Any, batch: Any) -> jax.Array:
        cast = jax.tree.map(lambda p: p.astype(compute), params)
        found = summed_loss(nnx.merge(graph, cast, rest), batch)
        return found.sum / jnp.maximum(found.count, 1)

    def step(values: Any, batches: Any) -> Any:
        params, state = values
        one = jax.value_and_grad(loss)
        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        add = lambda total, batch: (jax.tree.map(jnp.add, total, one(params, batch)), None)
        (value, grads), _ = jax.lax.scan(add, zeros, batches)
        count = plan.batch.accumulate
        changes, state = chain.update(jax.tree.map(lambda g: g / count, grads), state, params)
        return (optax.apply_updates(params, changes), state), value / count

    compiled = jax.jit(step, donate_argnums=0, out_shardings=everywhere)
    params = jax.device_put(params, everywhere)
    return PlainStep(mesh, (params, jax.jit(chain.init, out_shardings=everywhere)(params)), compiled)
