"""Model flops for MFU: the operations of a training step without recomputation."""

from torch import nn

from fullshard.on_torch.parallelize.state import State
from fullshard.on_torch.ranks.device_presets import known_device


def flops_per_token(model: nn.Module, sequence: int) -> float:
    """Flops of a training step per token: 6 per parameter of a matrix product (4 if it is frozen), plus attention over the
    full sequence. Embedding tables do not count. Of a mixture of experts, only the active share counts.
    """
    config = getattr(model, "config", None) or getattr(model, "size", None)
    share = _active_share(config)
    total = 0.0
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    for name, p in model.named_parameters():
        if p.ndim > 1 and (id(p) in multiplied or id(p) not in tables):
            total += p.numel() * (6.0 if p.requires_grad else 4.0) * (share if ".experts." in name else 1.0)
    return total + 12.0 * _attention_width(config) * sequence


def _active_share(config: object) -> float:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / experts if experts and chosen else 1.0


def _attention_width(config: object) -> float:
    """Layers × heads × head dim; 0 if the config does not say."""
    layers = _first(config, "num_hidden_layers", "layers")
    heads = _first(config, "num_attention_heads", "heads")
    head = _first(config, "head_dim") or _first(config, "hidden_size", "dim") / max(heads, 1)
    return layers * heads * head


def _first(config: object, *names: str) -> float:
    return next((float(value) for n in names if (value := getattr(config, n, None))), 0.0)


def peak_flops(state: State) -> float | None:
    """The nominal flops per second of this rank's device in its fastest dtype of training; None for a CPU or an unknown
    device."""
    found = known_device(state.device)
    return found.peak.training if found else None
