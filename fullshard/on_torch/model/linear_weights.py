"""The weights of plain linear layers, by name."""

from torch import nn


def linear_weights(model: nn.Module) -> set[str]:
    """The names of the weights of all `nn.Linear` layers that compute as torch's class does: no subclasses, and none of an
    adapter such as LoRA's, which compute together with the layer that they adapt."""
    adapted = tuple(f"{path}." for path, module in model.named_modules() if hasattr(module, "base_layer"))
    plain = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    return {f"{path}.weight".removeprefix(".") for path in plain if not path.startswith(adapted)}
