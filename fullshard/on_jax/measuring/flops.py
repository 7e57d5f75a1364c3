"""Model flops for MFU: the operations of a training step without recomputation."""

from flax import nnx

from fullshard.on_jax.model.built_in.layers import TokenEmbedding
from fullshard.on_jax.model.module_tree import named_modules, own_parameters
from fullshard.on_jax.model.scanned_layers import is_stacked
from fullshard.on_jax.parallelize.state import JaxState
from fullshard.on_jax.ranks.jax_devices import known_device


def flops_per_token(model: nnx.Module, sequence: int) -> float:
    """Flops of a training step per token: 6 per parameter of a matrix product, plus attention over the full sequence. Embedding
    tables do not count, unless they are multiplied with as well."""
    used: dict[int, int] = {}  # by parameter: its size where a product uses it
    for path, module in named_modules(model):
        for _, p in own_parameters(module):
            if p.ndim - is_stacked(path) > 1 and not isinstance(module, nnx.Embed | TokenEmbedding):
                used[id(p)] = p.size
    return 6.0 * sum(used.values()) + 12.0 * _attention_width(getattr(model, "size", None)) * sequence


def _attention_width(size: object) -> float:
    """Layers × heads × head dim; 0 if the model does not say."""
    return float(getattr(size, "layers", 0) * getattr(size, "dim", 0))


def peak_flops(state: JaxState) -> float | None:
    """The nominal flops per second of a device in its fastest dtype of training; None for a CPU or an unknown device."""
    found = known_device(state.shardings.mesh.devices.flat[0])
    return found.peak.training if found else None
