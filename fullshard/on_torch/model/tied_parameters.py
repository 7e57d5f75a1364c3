"""Tied parameters: one tensor that a model has under several names."""

from torch import nn


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter by its id, in registration order. A tied parameter has several."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return names


def tied_owners(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """For each tied parameter, the modules that own it, each with the attribute's name."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                owners.setdefault(id(p), []).append((module, name))
    return [found for found in owners.values() if len(found) > 1]
